from tests.models.conftest import zoo  # noqa: F401 - one fixture for both folders
