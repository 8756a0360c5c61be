"""The rules of the package that its sources show: import order, doors to the engine, devices, files, flags."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from megatron_moe.config import cli
from megatron_moe.config.fields import all_fields
from megatron_moe_tools import compat
from tests.helpers.sources import PACKAGE, PACKAGES, ROOT, TOOLS, imported, name_of, nodes, sources

# A room may import from the rooms before it.
ROOMS = (
    "config",
    "io",
    "platform",
    "engine",
    "parallel",
    "precision",
    "kernels",
    "data",
    "moe",
    "model",
    "checkpoint",
    "hf",
    "report",
    "optim",
    "training",
)

# Modules above the rooms, which programs are started by.
ENTRIES = {"__init__.py", "__main__.py", "pretrain.py"}

# What the programs of megatron_moe_tools share; each other folder or file there is one of them.
SHARED_BY_TOOLS = ("compat", "launch", "megatron_lm", "models", "prepare")


# Files outside engine/ that import megatron-core, each with what it builds of it.
BUILT_OF_THE_ENGINE = {
    "data/datasets.py": "datasets, and their order",
    "model/build.py": "GPTModel, and the specs of its layers",
    "model/engine_config.py": "the engine's configurations",
    "model/mtp.py": "a block of specs",
    "model/overlap.py": "plans of two micro-batches",
    "moe/flex.py": "DeepEP's and HybridEP's kernels",
    "megatron_moe_tools/doctor/trainers/megatron_core_target.py": "the engine as Megatron-LM runs it, to be checked",
}

# What torch, the engine and other libraries read of objects that are theirs: public, and never taken back.
READ_BY_OTHERS = {
    *("main_grad", "allreduce", "average_gradients_across_tp_domain"),  # of a parameter
    *("tensor_model_parallel", "partition_dim", "partition_stride"),
    *("output_layer", "word_embeddings", "self_attention"),  # a module in a module's place
    *("residual", "norm_checkpoint"),  # of a layer's state in a plan of two micro-batches
    *("random_seed", "split_matrix", "path_to_cache"),  # of a configuration of data
    "fp32_precision",  # of torch.backends
    *("atexit", "daemon", "restype", "excepthook", "__cause__"),  # of the standard library
    *("training_script", "training_script_args", "log_dir"),  # of torchrun's arguments
    "eager",  # of a function that `kernels/choice.py` has decorated
}

# torch.cuda outside platform/ and engine/, each with its reason.
CUDA_OUTSIDE_PLATFORM = {
    "parallel/groups.py": "NCCL binds a process group to the current device, which is chosen beside the group",
    "checkpoint/state.py": "the device's random state is saved and restored beside the CPU's",
    "megatron_moe_tools/preflight/node.py": "a check of a machine asks its device what a run does not ask",
}

# Files that may read pickled bytes, each with its reason.
UNPICKLING = {
    "checkpoint/index.py": "builds stand-ins from an allow-list, before the engine reads the same file without one"
}

# Files that rename or sync by themselves, each with its reason; all others write through io/files.py.
WRITING_BY_HAND = {
    "megatron_moe_tools/convert/workspace.py": "a journal is appended to, and a folder is renamed as a whole",
    "checkpoint/lock.py": "a lock is linked, and taken over by a rename, so that one of several rivals has it",
    "checkpoint/folder.py": "a step's folder is renamed as a whole; a pointer is put back while the disk fails",
    "hf/safetensors_file.py": "a file is written tensor by tensor at known places",
    "report/jsonl.py": "lines are appended",
}

LONGEST_TOOL = 30
ENTRIES_OF_TOOLS = ("api", "console", "pretrain", "train", "slurm", "kubernetes", "skypilot")


def imports(*folders: str) -> Iterator[tuple[Path, str, int]]:
    """(file, what it imports, line) for every import."""
    return ((path, *found) for path in sources(*folders) for found in imported(path))


# ---- rooms


def test_every_folder_of_the_package_is_a_room():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ROOMS)
    assert {path.name for path in PACKAGE.glob("*.py")} == ENTRIES


def test_a_room_imports_only_rooms_before_it():
    wrong = []
    for path, name, line in imports("megatron_moe"):
        room, imported_room = path.relative_to(PACKAGE).parts[0], f"{name}.".split(".")[1]
        if room in ROOMS and name.startswith("megatron_moe.") and imported_room in ROOMS[ROOMS.index(room) + 1 :]:
            wrong.append(f"{name_of(path)}:{line}: {room} imports {name}")
    assert wrong == []


def imports_within_the_package() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, also in functions and for typing only."""
    files = {str(path.relative_to(ROOT).with_suffix("")).replace("/", "."): path for path in sources("megatron_moe")}
    graph = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found: dict[str, set[str]] = {name: set() for name in graph}
    for name, path in graph.items():
        for target, _ in imported(path):
            module = target if target in graph else target.rpartition(".")[0]
            if module in graph and module != name:
                found[name].add(module)
    return found


def test_files_do_not_import_one_another_in_a_circle():
    TopologicalSorter(imports_within_the_package()).prepare()


def test_the_trainer_imports_none_of_its_tools():
    """But for the package's front door, which has the names of the Python interface for type checkers."""
    wrong = {
        (name_of(path), name) for path, name, _ in imports("megatron_moe") if name.startswith("megatron_moe_tools")
    }
    assert {file for file, _ in wrong} == {"__init__.py"} and all("megatron_moe_tools.api" in name for _, name in wrong)


def test_no_tool_imports_another():
    """A program stands on the trainer and on what the tools share: what two of them need belongs there."""
    wrong = []
    for path, name, line in imports("megatron_moe_tools"):
        tool, imported_tool = path.relative_to(TOOLS).parts[0], f"{name}.".split(".")[1]
        if not name.startswith("megatron_moe_tools.") or imported_tool in (tool, *SHARED_BY_TOOLS):
            continue
        if tool.removesuffix(".py") not in ENTRIES_OF_TOOLS:
            wrong.append(f"{name_of(path)}:{line}: imports {name}")
    assert wrong == []


def test_a_script_in_tools_only_calls_a_tool():
    doors = {path for path, name, _ in imports("tools") if name.startswith("megatron_moe_tools.")}
    assert len(doors) > 2
    assert [path for path in doors if len(path.read_text().splitlines()) >= LONGEST_TOOL] == []


def test_nothing_in_the_package_imports_scripts_or_tests():
    outside = {"tools", "tests", "benchmarks", "pretrain_moe", "examples"}
    wrong = [
        f"{name_of(path)}:{line}: imports {name}"
        for path, name, line in imports("megatron_moe")
        if name.split(".")[0] in outside
    ]
    assert wrong == []


# ---- one hand on the engine


def product() -> list[Path]:
    return [*sources(*PACKAGES, "tools"), ROOT / "pretrain_moe.py"]


def outside_engine() -> Iterator[Path]:
    return (path for path in product() if not name_of(path).startswith("engine/"))


def test_the_engine_is_imported_in_one_room_and_by_what_is_built_of_it():
    found = {name_of(path) for path in product() for name, _ in imported(path) if f"{name}.".startswith("megatron.")}
    assert {file for file in found if not file.startswith("engine/")} == set(BUILT_OF_THE_ENGINE)
    assert len(found) <= 25


def assigned(path: Path) -> Iterator[ast.Attribute]:
    """Each attribute that a file assigns to."""
    for node in nodes(path):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part for part in parts if isinstance(part, ast.Attribute))


def own_attributes() -> set[str]:
    """The names of all methods and attributes of the classes of both packages."""
    found = set()
    for path in sources(*PACKAGES):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found |= {part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef)}
                found |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        found |= {one.attr for one in assigned(path) if ast.unparse(one.value) == "self"}
    return found


def test_only_the_engine_room_changes_what_is_not_ours():
    """No mocks, no other class or function for an object, and no attribute on it that no class of ours has."""
    allowed, wrong = own_attributes() | READ_BY_OTHERS, []
    for path in outside_engine():
        of_torch = [name for name, _ in imported(path) if name.split(".")[0] in ("torch", "megatron")]
        foreign = {name.rpartition(".")[2] for name in of_torch} | {name.split(".")[0] for name in of_torch}
        wrong += [f"{name_of(path)}:{line}: {name}" for name, line in imported(path) if name.startswith("unittest")]
        for one in assigned(path):
            base = ast.unparse(one).split(".")[0]
            planted = bool(of_torch) and base not in ("self", "cls", "ctx") and one.attr not in allowed
            if planted or base in foreign or one.attr == "__class__":
                wrong.append(f"{name_of(path)}:{one.lineno}: assigns {ast.unparse(one)}")
    assert wrong == []


# ---- devices, pickles


def cuda_mentions(path: Path) -> list[int]:
    """Lines that name torch.cuda, call `.cuda()`, or name the device "cuda"."""
    lines = []
    for node in nodes(path):
        named = isinstance(node, ast.Attribute) and node.attr == "cuda"
        device = (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value)
        )
        if named or device:
            lines.append(node.lineno)
    return sorted(set(lines) | {line for name, line in imported(path) if name.startswith("torch.cuda")})


def test_only_platform_and_engine_name_cuda():
    outside = {
        name_of(path): lines
        for path in outside_engine()
        if not name_of(path).startswith("platform/") and (lines := cuda_mentions(path))
    }
    assert set(outside) - set(CUDA_OUTSIDE_PLATFORM) == set(), outside
    assert set(CUDA_OUTSIDE_PLATFORM) - set(outside) == set(), "the list names files that no longer need it"


def unpickles(path: Path) -> bool:
    """Whether a file names a reader of pickles: pickle.load, pickle.loads, pickle.Unpickler, or another library's."""
    readers = {"load", "loads", "Unpickler"}
    named = any(
        isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle" and node.attr in readers
        for node in nodes(path)
    )
    names = [name.split(".") for name, _ in imported(path)]
    return named or any(n[0] in ("cloudpickle", "dill", "joblib") or (n[0] == "pickle" and n[1:]) for n in names)


def test_pickled_bytes_are_read_only_where_it_is_guarded():
    assert {name_of(path) for path in sources(*PACKAGES, "tools") if unpickles(path)} == set(UNPICKLING)
    unsafe = re.compile(r"weights_only\s*=\s*False|trust_remote_code\s*=\s*True|allow_pickle\s*=\s*True")
    assert [name_of(path) for path in sources(*PACKAGES, "tools") if unsafe.search(path.read_text())] == []


def test_torch_loads_weights_only():
    paths = [*sources(*PACKAGES, "tools", "benchmarks"), ROOT / "pretrain_moe.py"]
    calls = [
        (f"{name_of(path)}:{node.lineno}", {word.arg: ast.unparse(word.value) for word in node.keywords})
        for path in paths
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.jit.load", "np.load")
    ]
    assert calls and [place for place, words in calls if words.get("weights_only") != "True"] == []
    assert [name_of(path) for path in paths if "torch.load" in {name for name, _ in imported(path)}] == []


# ---- files


def test_files_are_replaced_and_synced_in_one_place():
    calls = {"os.replace", "os.rename", "os.renames", "os.fsync", "os.fdatasync", "tempfile.mkstemp", "shutil.move"}
    by_hand = {
        name_of(path)
        for path in product()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in calls
    }
    assert by_hand - {"io/files.py", "io/hashing.py"} == set(WRITING_BY_HAND)


# ---- tests

# Rooms whose tests are of no module by itself.
OTHER_ROOMS = {"docs", "gpu", "helpers", "house", "numbers", "soak"}


def test_a_test_file_bears_the_name_of_the_module_that_it_tests():
    wrong = []
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        room, name = path.parent.name, path.stem.removeprefix("test_") + "_"
        modules = [*(PACKAGE / room).rglob("*"), *TOOLS.rglob("*")]
        if room not in OTHER_ROOMS and not any(name.startswith(f"{module.stem}_") for module in modules):
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


# ---- flags and start-up


def test_one_field_is_one_flag():
    parser = compat.parser()
    options: dict[str, str] = {}
    for action in parser._actions:
        for option in action.option_strings:
            assert option not in options
            options[option] = action.dest
    fields = all_fields()
    for name, field in fields.items():
        owned = {option for option, dest in options.items() if dest == name}
        spellings = {flag for flag, (owner, _) in cli.SPELLINGS.items() if owner == name}
        assert owned == {field.flag} | ({field.negative_flag} if field.is_bool else set()) | spellings
    no_fields = {"help", "preset", "config", "defaults", "deepspeed", "deepspeed_config"}
    assert set(options.values()) - set(fields) == no_fields


def test_reading_and_checking_a_command_line_loads_neither_torch_nor_the_engine():
    program = (
        "import sys\n"
        "from megatron_moe.config import rules\n"
        "from megatron_moe_tools import compat, train\n"
        "train.split(['--nproc-per-node', 'auto'], {})\n"
        "rules.check(compat.parse('--preset tiny --mock-data --vocab-size 99'.split()), 1)\n"
        "print([name for name in ('torch', 'numpy', 'megatron.core', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_listed_and_an_unknown_one_is_an_attribute_error():
    import megatron_moe

    assert set(megatron_moe.__all__) <= set(dir(megatron_moe)) and not hasattr(megatron_moe, "nothing")
