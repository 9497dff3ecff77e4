"""The engine for scripts: what it makes of a model's directory."""

import json
import shutil
from pathlib import Path

from lockstep_engine import Engine, SamplingParams

MODEL = Path(__file__).parents[3] / "models/reference"
TEXT = "It was a dark night, and the wind"


def test_a_tokenizer_that_truncates_and_pads_does_not_change_prompts(tmp_path):
    path = shutil.copytree(MODEL, tmp_path / "model")
    settings = json.loads((path / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    (path / "tokenizer.json").write_text(json.dumps(settings))
    with Engine(path, threads=1) as engine:
        ids = engine.encode(TEXT)
        assert 4 < len(ids) < 40
        assert engine.decode(ids) == TEXT
        params = SamplingParams(max_tokens=4, temperature=0)
        assert engine.generate_ids([TEXT], params) == engine.generate_ids([ids], params)
