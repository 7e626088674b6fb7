"""What every front end needs, whatever protocol it speaks: text in and out, replies, pacing, sizes.

A front end makes a `Prompt` of what a client sent and starts it with `InFlight`; `Sender` then answers its
`ClientStream`, with responses that a `ResponseMaker` of the protocol makes.
"""
