"""Settings of stored click models, which may come from somebody else."""

from __future__ import annotations

import json

import pytest

from nonet import trust
from nonet.errors import ConfigError
from nonet.models.clicks.model import ClickSetup
from nonet.trust import approve_code, check_reference, guard_folder


def test_the_settings_of_a_stored_model_are_guarded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_guarded", {})
    monkeypatch.setattr(trust, "_approved", set())
    run, use = tmp_path / "run", f"{tmp_path}/outside.py:SPEC"
    (run / "clicks").mkdir(parents=True)
    (run / "scenario.yaml").write_text("tokenizer: {use: 'json:loads'}\n")
    setup = {"model": {"use": use}, "tables": {}, "features": {}, "combiners": {}, "history": 1, "seed": 1}
    (run / "clicks/model.json").write_text(json.dumps({"setup": setup}))
    approve_code(run)
    guard_folder(run)
    assert ClickSetup.read(run / "clicks/model.json").model["use"] == use
    with pytest.raises(ConfigError, match=r"outside\.py:SPEC"):
        check_reference(use, "model", tmp_path / "outside.py")
