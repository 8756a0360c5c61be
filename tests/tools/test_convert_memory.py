"""The converter's memory is that of a layer and not of the model, there and back."""

from pathlib import Path

from benchmarks.convert_16b import hashes, make, model
from megatron_moe.config.schema import replace
from tests.helpers.conversions import convert
from tests.helpers.ranks import Child, RankParent
from tests.hf import small_folders

MIB = 2**20


def measured(argument: list[str]) -> None:
    """Convert in a process of its own, and write by how many bytes its memory grew at most.

    A small model is converted first, so that what is loaded for a conversion is loaded before.
    """
    origin, target, load, save, told = argument
    small = Path(told).with_suffix("")
    small_folders.sound(small / "hf", small / "sentinel")
    convert("hf", "native", small / "hf", small / "native")
    convert("native", "hf", small / "native", small / "back")
    before = most_memory()
    convert(origin, target, load, Path(save))
    Path(told).write_text(str(most_memory() - before))


def most_memory() -> int:
    """Bytes that this process has had at most, as Linux tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def grown(parent: RankParent, folder: Path, origin: str, target: str, load: str, save: str) -> int:
    told, log = folder / f"{save}-told.json", folder / f"{save}.log"
    argument = [origin, target, str(folder / load), str(folder / save), str(told)]
    child = Child("tests.tools.test_convert_memory:measured", argument, str(log))
    assert parent.statuses(parent.fork([child]), 600) == [0], log.read_text()
    return int(told.read_text())


def test_a_conversion_holds_at_most_two_layers_of_a_model_of_eight(rank_parent, tmp_path):
    run = replace(model(8), hidden_size=512, ffn_hidden_size=1024, vocab_size=4000, num_attention_heads=8)
    experts = {"num_experts": 12, "moe_router_topk": 4, "moe_ffn_hidden_size": 176}
    run = replace(run, **experts, moe_shared_expert_intermediate_size=352)
    size = make(run, tmp_path / "hf")
    there = grown(rank_parent, tmp_path, "hf", "native", "hf", "native")
    back = grown(rank_parent, tmp_path, "native", "hf", "native", "back")
    layer = max(path.stat().st_size for path in (tmp_path / "native").glob("iter_*/__0_*.distcp"))
    assert size > 7 * layer > 3 * layer + 24 * MIB
    assert max(there, back) < 2 * layer + 12 * MIB
    assert hashes(tmp_path / "native") == hashes(tmp_path / "back")
