"""Where settings come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from distribai.config import Home, load
from distribai.errors import UsageError
from distribai.sections import BOUNDS, SECTIONS


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"DISTRIBAI_HOME": str(tmp_path / "home")}


def write_user_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "home" / "config.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_each_source_overrides_the_one_below_it_and_is_named(
    tmp_path: Path, env: dict[str, str]
) -> None:
    name = "orchestrator.http_port"

    def found(flag: int | None = None) -> tuple[object, str]:
        setting = load({name: flag}, env=env, directory=tmp_path)[name]
        return setting.value, setting.source

    assert found() == (8766, "default")
    user = write_user_file(tmp_path, "[orchestrator]\nhttp_port = 1\n")
    assert found() == (1, str(user))
    local = tmp_path / "distribai.toml"
    local.write_text("[orchestrator]\nhttp_port = 2\n")
    assert found() == (2, str(local))
    env["DISTRIBAI_ORCHESTRATOR_HTTP_PORT"] = "3"
    assert found() == (3, "DISTRIBAI_ORCHESTRATOR_HTTP_PORT")
    assert found(4) == (4, "--http-port")
    assert found(None) == (3, "DISTRIBAI_ORCHESTRATOR_HTTP_PORT")


def test_sections_become_the_settings_of_their_rooms(tmp_path: Path, env: dict[str, str]) -> None:
    env |= {
        "DISTRIBAI_LIVENESS_OFFLINE_S": "4",
        "DISTRIBAI_NODE_SHARE": "0.5",
        "DISTRIBAI_ORCHESTRATOR_INSECURE": "yes",
        "DISTRIBAI_URL": "http://grid:1",
    }
    settings = load(env=env, directory=tmp_path)
    assert settings.orchestrator().liveness.offline_s == 4.0
    assert settings.orchestrator().insecure is True
    assert settings.orchestrator().state_dir == tmp_path / "home" / "state" / "orchestrator"
    assert settings.node().share == 0.5
    assert settings.client().url == "http://grid:1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[orchestrator]\nhttp_prot = 1\n", "orchestrator.http_port"),
        ("[livness]\ntick_s = 1\n", "liveness.tick_s"),
        ("http_port = 1\n", "outside of a section"),
        ("[orchestrator]\nhttp_port = '1'\n", "a whole number"),
        ("[orchestrator]\nhttp_port = true\n", "a whole number"),
        ("[orchestrator]\nhttp_port = 70000\n", "between 0 and 65535"),
        ("[node]\nshare = nan\n", "between"),
        ("[node\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_nearest_name(
    tmp_path: Path, env: dict[str, str], text: str, said: str
) -> None:
    (tmp_path / "distribai.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load(env=env, directory=tmp_path)
    assert caught.value.code == "config.invalid"
    assert said in caught.value.message + caught.value.hint
    assert "distribai.toml" in caught.value.message


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("DISTRIBAI_NODE_THREDS", "1", "DISTRIBAI_NODE_THREADS"),
        ("DISTRIBAI_NODE_THREADS", "many", "a whole number"),
        ("DISTRIBAI_ORCHESTRATOR_INSECURE", "perhaps", "true or false"),
        ("DISTRIBAI_SOMETHING", "1", "config show"),
    ],
)
def test_a_wrong_variable_is_refused(
    tmp_path: Path, env: dict[str, str], variable: str, text: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(env={**env, variable: text}, directory=tmp_path)
    assert said in caught.value.message + caught.value.hint


def test_an_empty_variable_is_no_setting(tmp_path: Path, env: dict[str, str]) -> None:
    env["DISTRIBAI_NODE_THREADS"] = ""
    assert load(env=env, directory=tmp_path)["node.threads"].source == "default"


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "distribai.toml").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        load(env=env, directory=tmp_path)


def test_without_a_chosen_home_the_system_s_places_are_used(tmp_path: Path) -> None:
    home = Home.find({})
    assert home.state.name == home.cache.name == "distribai"
    assert home.credentials.parent == home.state


def test_every_number_has_bounds_that_hold_its_default(tmp_path: Path, env: dict[str, str]) -> None:
    settings = load(env=env, directory=tmp_path)
    numbers = {s.name: s.value for s in settings if type(s.value) in (int, float)}
    assert set(BOUNDS) == set(numbers)
    assert all(BOUNDS[name][0] <= value <= BOUNDS[name][1] for name, value in numbers.items())
    assert {s.name.partition(".")[0] for s in settings} == set(SECTIONS)
