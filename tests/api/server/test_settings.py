"""Settings from flags, the environment and TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ramet import InvalidInput
from ramet.api import cli
from ramet.api.server import run
from ramet.api.server.settings import Settings, read_config


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"port": 70_000}, "--port"),
        ({"port": True}, "--port"),
        ({"model_names": ()}, "--served-model-name"),
        ({"model_names": ("",)}, "--served-model-name"),
        ({"max_running": 0}, "--max-concurrent-requests"),
        ({"max_body_bytes": 10}, "--max-body-bytes"),
        ({"shutdown_timeout": float("nan")}, "--shutdown-timeout"),
        ({"host": "0.0.0.0"}, "--host"),
    ],
)
def test_bad_settings_name_their_flag(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Settings(**change)
    assert caught.value.field == flag


def test_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "ramet.toml"
    file.write_text('port = 9\nmax-model-len = 64\nhost = "::1"\n')
    assert read_config(file, {"port", "host", "max_model_len"}) == {
        "port": 9,
        "max_model_len": 64,
        "host": "::1",
    }
    with pytest.raises(InvalidInput, match="unknown options: max_model_len"):
        read_config(file, {"port", "host"})
    file.write_text("port = ")
    with pytest.raises(InvalidInput, match="TOML"):
        read_config(file, {"port"})
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_config(tmp_path / "missing", {"port"})


def test_flags_outweigh_the_environment_which_outweighs_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ramet.toml"
    file.write_text('port = 1\nblock_size = 8\nseed = 5\ndevice = "cpu"\nserved-model-name = ["x", "y"]\n')
    seen: list[Any] = []
    monkeypatch.setattr(run, "run", lambda *arguments: seen.extend(arguments))
    environment = {"RAMET_PORT": "2", "RAMET_BLOCK_SIZE": "4", "RAMET_API_KEY": "sk-first-0001 sk-other-0002"}
    arguments = ["serve", "some/model", "--port", "3", "--config", str(file), "--host", "0.0.0.0"]
    arguments += ["--dtype", "float16"]
    done = CliRunner().invoke(cli.app, arguments, env=environment)
    assert done.exit_code == 0, done.output
    model, engine, settings, keys, level = seen
    assert (model, settings.port, level) == ("some/model", 3, "info")
    assert (engine["block_size"], engine["seed"]) == (4, 5)
    assert (engine["device"], engine["dtype"]) == ("cpu", "float16")
    assert (settings.model_names, settings.host, settings.has_keys) == (("x", "y"), "0.0.0.0", True)
    assert keys.tenant_of(b"Bearer sk-other-0002")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", "short"], "--api-key"),
        (["--log-level", "loud"], "--log-level"),
        (["--config", "/nowhere.toml"], "--config"),
        (["--cache-scope", "all"], "--cache-scope"),
    ],
)
def test_bad_options_end_with_an_error(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert done.exit_code != 0
    assert message in f"{done.output} {done.exception}"
