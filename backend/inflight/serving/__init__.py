"""Services for front ends of every protocol: text in and out, replies, sessions, sizes.

A front end converts a client's input to a `Prompt` and starts it with `InFlight`. `Sender` then answers its
`ClientStream`, with responses from the protocol's `ResponseMaker`. A front end whose clients are coroutines
starts prompts with an `EngineSession` instead, and reads an `OutputStream`. docs/responses.md says which one
to use.
"""
