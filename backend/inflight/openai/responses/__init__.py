"""OpenAI's Responses API: a body becomes a chat's, and the chat's answer becomes items and events.

`body` and `items` translate a request to a ChatBody, which is answered as in /v1/chat/completions; `writer`
makes the items and the events of a stream from the answer; `store` keeps responses; `routes` has the routes.
"""
