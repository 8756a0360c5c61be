"""The presets of published models are their authors' configurations, and count as their authors and transformers do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from megatron_moe.config.presets_published import PUBLISHED
from megatron_moe.config.schema import build, flatten, replace
from megatron_moe.hf import config as hf_config
from megatron_moe.hf.families import family_of_run
from tests.helpers.rows import rows

# What lies on the hub beside the weights: of one model of each family all that is said of the architecture and some
# more, which is seen to be passed over; of the others the keys that decide something. The presets name the sources.
CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())

# Total parameters in billions as their publishers round them, where they say so, and what they count.
SIZES = {
    "deepseek-v2": ("236", "all", "arXiv 2405.04434"),
    "deepseek-v2-lite": ("15.7", "all", "arXiv 2405.04434, appendix B"),
    "deepseek-coder-v2": ("236", "all", "arXiv 2406.11931"),
    "deepseek-coder-v2-lite": ("16", "all", "arXiv 2406.11931"),
    "deepseek-v3": ("671", "all", "arXiv 2412.19437"),
    # 1.026. The report's 1.04 (arXiv 2507.20534) is this model with a layer of predictions, which was not released.
    "kimi-k2": ("1", "all, in trillions", "https://huggingface.co/moonshotai/Kimi-K2-Base"),
    "moonlight-16b-a3b": ("15.29", "without tables", "arXiv 2502.16982; the model card: without embeddings"),
    "glm-4.5": ("355", "with prediction, without tables", "arXiv 2508.06471, table 1"),
    # The same table says that it counts the layer of predictions; with it, the figure is 108.
    "glm-4.5-air": ("106", "without tables", "arXiv 2508.06471, table 1"),
    "mixtral-8x7b": ("46.7", "all", "https://mistral.ai/news/mixtral-of-experts"),
    "mixtral-8x22b": ("141", "all", "https://mistral.ai/news/mixtral-8x22b"),
    "qwen1.5-moe-a2.7b": ("14.3", "all", "https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B"),
    "qwen2-57b-a14b": ("57", "all", "arXiv 2407.10671"),
    "qwen3-30b-a3b": ("30.5", "all", "https://huggingface.co/Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": ("235", "all", "arXiv 2505.09388"),
}


def test_every_preset_of_a_published_model_is_held_against_its_publication():
    assert set(PUBLISHED) == set(CONFIGS) == set(SIZES)


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_size_that_its_publisher_says(name):
    said, counted, _ = SIZES[name]
    run = build(PUBLISHED[name])
    if "with prediction" in counted:
        run = replace(run, mtp_num_layers=1)
    vocab = run.model.vocab_size
    count = run.derived.parameter_count(vocab)
    if "without tables" in counted:
        count -= 2 * vocab * run.model.hidden_size
    digits = len(said.partition(".")[2])
    assert f"{count / (1e12 if 'trillions' in counted else 1e9):.{digits}f}" == said
