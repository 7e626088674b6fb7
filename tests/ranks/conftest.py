from __future__ import annotations

from tests.models.conftest import zoo  # noqa: F401 - one fixture for all folders
