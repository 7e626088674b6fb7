from __future__ import annotations

from collections.abc import Callable, Iterator

import openai
import pytest
from playwright.sync_api import Browser, Page, expect

from inflight.core.ports import EngineClient
from tests.openai_endpoint.playground.browser import PATIENCE_MS, opened_browser
from tests.openai_endpoint.serving import demo_engine, served

expect.set_options(timeout=PATIENCE_MS)

OpenPage = Callable[..., Page]


@pytest.fixture(scope="package")
def engine_client() -> Iterator[EngineClient]:
    with demo_engine(kernels="torch") as client:
        yield client


@pytest.fixture(scope="package")
def playground_url(engine_client: EngineClient) -> Iterator[str]:
    with served(engine_client) as url:
        yield url


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with opened_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser, playground_url: str) -> Iterator[OpenPage]:
    """Opens the page in a new browser context; afterwards, asserts that no script failed."""
    contexts, problems = [], []

    def open_page(
        url: str = playground_url, before: Callable[[Page], object] = lambda page: None, **options
    ) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        before(page)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def api(playground_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{playground_url}/v1", api_key="none", max_retries=0) as client:
        yield client
