"""The counts of the process that encodes pictures, on tritonserver's metrics page."""

from __future__ import annotations

from types import SimpleNamespace

from inflight.pictures.encoded_prompt import PictureStats
from inflight.triton.picture_metrics import PictureMetrics
from tests.prometheus import Page, parse
from tests.triton.fake_metrics import FakeMetrics


def page_with(server: FakeMetrics, *told: PictureStats | None) -> Page:
    """Return the page after a model has been loaded and the page has been read once for each but the first."""
    answers = iter(told)
    module = SimpleNamespace(MetricFamily=server.family_class)
    metrics = PictureMetrics(module, "multimodal_encoders", "1", lambda _timeout_s: next(answers))
    for _ in told[1:]:
        metrics.update(0.1)
    return parse(server.page())


def test_the_counts_are_on_the_page() -> None:
    page = page_with(FakeMetrics(), None, PictureStats(2, 1, 1500.0, 64), PictureStats(3, 5, 2250.0, 32))
    assert page.value("inflight_pictures_total", model="multimodal_encoders", rows="encoded") == 3
    assert page.value("inflight_pictures_total", version="1", rows="cached") == 5
    assert page.value("inflight_picture_encoding_seconds_total", model="multimodal_encoders") == 2.25
    assert page.value("inflight_picture_cache_bytes", model="multimodal_encoders") == 32


def test_counters_begin_at_zero_and_stay_while_the_process_does_not_answer() -> None:
    assert page_with(FakeMetrics(), None).series("inflight_pictures_total", "rows") == {
        "encoded": 0,
        "cached": 0,
    }
    page = page_with(FakeMetrics(), None, PictureStats(2, 1, 1.0, 64), None)
    assert page.value("inflight_pictures_total", rows="encoded") == 2


def test_a_process_that_was_started_again_adds_to_the_counts() -> None:
    told = [PictureStats(1, 7, 1000.0, 64, started_ns=1), PictureStats(1, 9, 500.0, 16, started_ns=2)]
    page = page_with(FakeMetrics(), None, *told)
    assert page.series("inflight_pictures_total", "rows") == {"encoded": 2, "cached": 16}
    assert page.value("inflight_picture_encoding_seconds_total") == 1.5


def test_a_model_that_is_loaded_again_counts_nothing_twice() -> None:
    server = FakeMetrics()
    page_with(server, None, PictureStats(5, 7, 1000.0, 64))
    page = page_with(server, PictureStats(5, 7, 1000.0, 64), PictureStats(6, 7, 1250.0, 64))
    assert page.series("inflight_pictures_total", "rows") == {"encoded": 6, "cached": 7}


def test_a_family_that_the_server_refuses_does_not_keep_others_away() -> None:
    server = FakeMetrics()
    server.failures["inflight_pictures_total"] = RuntimeError("no")
    page = page_with(server, None, PictureStats(1, 0, 1000.0, 64))
    assert page.value("inflight_picture_cache_bytes") == 64 and not page.has("inflight_pictures_total")
