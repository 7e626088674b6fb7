"""A serving model between fake Triton requests and a fake engine."""

from __future__ import annotations

from inflight.config import Role
from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason
from inflight.serving.completion_text import TokenizerFinder
from inflight.tensors.spec import Vocabulary
from inflight.triton.front_end import FrontEnd
from tests.tensors.factories import make_description, make_result
from tests.triton.factories import FakeEngineClient, make_model_args, make_parameters
from tests.triton.fake_pb_utils import FakePbUtils, InferenceRequest, ResponseSender, Sent
from tests.triton.letters import letter_tokenizer


class Stage:
    """A front end with its engine client, its tokenizer of letters and its log."""

    def __init__(
        self, vocabulary: Vocabulary = Vocabulary.TOKENS, decoupled: bool = True, **parameters: str
    ) -> None:
        self.client = FakeEngineClient(make_description(tokenizer_dir="letters"))
        self.pb_utils = FakePbUtils()
        self.front_end = FrontEnd(
            self.pb_utils,
            self.client,
            self.client.close,
            make_model_args(make_parameters(Role.FRONT_END, **parameters), decoupled),
            TokenizerFinder(None, lambda directory: letter_tokenizer()),
            vocabulary,
        )

    def take(self, request: InferenceRequest) -> ResponseSender:
        self.front_end.execute([request])
        return request.sender

    def finish(self, ids: list[int], **result: object) -> None:
        """Send the engine's only response to the last request."""
        response = Response(
            self.client.last_id, make_result(ids, FinishReason.LENGTH, **result), is_final=True
        )
        self.client.respond(response)


def error_of(sent: Sent) -> tuple[int, str]:
    assert sent.response is not None
    error = sent.response.error()
    assert error is not None and sent.is_final
    return error.code(), error.message()


def value_of(sent: Sent, name: str) -> object:
    assert sent.response is not None
    return sent.response.arrays()[name].ravel().tolist()
