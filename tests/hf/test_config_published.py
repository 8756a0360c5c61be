"""The presets of published models are their authors' configurations, and count as transformers does."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_moe.config.presets import PUBLISHED
from megatron_moe.config.schema import build, flatten
from megatron_moe.hf import config as hf_config
from megatron_moe.hf.families import family_of_run
from tests.helpers.rows import rows

# What lies on the hub beside the weights: of one model of each family all that is said of the architecture and some
# more, which is seen to be passed over; of the others the keys that decide something. The presets name the sources.
CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())


def test_every_preset_of_a_published_model_is_held_against_its_publication():
    assert set(PUBLISHED) == set(CONFIGS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_its_published_configuration_is_read_as(name):
    read = hf_config.settings(CONFIGS[name], has_prediction_layers=False, where=name)
    flat = flatten(build(PUBLISHED[name]))
    assert {key: flat[key] for key in read.flat} == read.flat
    assert [note for note in read.notes if "num_nextn_predict_layers" not in note] == []
    promised = CONFIGS[name].get("num_nextn_predict_layers", 0)
    assert len(read.notes) == promised
    if promised:
        with_them = hf_config.settings(CONFIGS[name], has_prediction_layers=True, where=name)
        assert with_them.flat == {**read.flat, "mtp_num_layers": promised} and not with_them.notes


ONE_OF_A_FAMILY = ["deepseek-v2-lite", "moonlight-16b-a3b", "mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b"]
ONE_OF_A_FAMILY += ["glm-4.5-air"]


@pytest.mark.parametrize("name", rows(PUBLISHED, test=ONE_OF_A_FAMILY))
def test_a_preset_has_as_many_parameters_as_transformers_builds(name):
    run = build(PUBLISHED[name])
    vocab = run.model.vocab_size
    assert run.derived.padded_vocab_size(vocab) == vocab
    for config in (CONFIGS[name], hf_config.config_of(run, family_of_run(run), "bfloat16")):
        fields = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
        # transformers knows Kimi-K2 by the class it shares with DeepSeek-V3.
        described = transformers.AutoConfig.for_model(
            fields.pop("model_type").replace("kimi_k2", "deepseek_v3"), **fields
        )
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(described)
        assert sum(parameter.numel() for parameter in model.parameters()) == run.derived.parameter_count(vocab)
