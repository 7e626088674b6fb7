"""Services for front ends of every protocol: text in and out, replies, sessions, sizes.

A front end converts a client's input to a `Prompt` and starts it with `InFlight`. `Sender` then sends the
responses, which the protocol's `ResponseMaker` makes, to the request's `ClientStream`. A front end whose
clients are coroutines starts prompts with an `EngineSession` instead, and reads an `OutputStream`.
docs/responses.md explains which of the two to use.
"""
