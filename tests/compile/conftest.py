"""`make test-compile` runs these, outside of Triton's interpreter and with the compiler that they are for."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "0" else ["test_*"]
