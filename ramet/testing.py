"""What tests need to look inside an engine; see ramet.engine.testing."""

from ramet.engine.testing import *  # noqa: F403
