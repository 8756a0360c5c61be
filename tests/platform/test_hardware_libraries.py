"""A Transformer Engine or apex that is installed and cannot be loaded: hidden, named, and refused by reason."""

import functools
import sys

import pytest

from megatron_moe.config.errors import ConfigError
from megatron_moe.model import build
from megatron_moe.moe.layer import _te_experts
from megatron_moe.platform import hardware

pytestmark = pytest.mark.engine

FAILURES = {
    "another torch": "ImportError: undefined symbol: _ZN3c105ErrorC2E",
    "another CUDA": "OSError: libcudart.so.11.0: cannot open shared object file",
    "no extension": "AssertionError: Could not find shared object file.",
    "two builds": "RuntimeError: found several builds",
    "an unrelated package": "ModuleNotFoundError: No module named 'pytorch'",
}


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Install libraries whose code is given, in place of what is there; they are gone afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hardware, "why_not_loaded", functools.cache(hardware.why_not_loaded.__wrapped__))

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in ("transformer_engine", "apex", "amp_C")]

    for name in loaded():
        monkeypatch.delitem(sys.modules, name)

    def write(package: str, module: str, code: str) -> None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"from {package} import common\n")
        (tmp_path / package / "common.py").touch()
        (tmp_path / package / f"{module}.py").write_text(code)

    yield write
    for name in loaded():
        del sys.modules[name]


def failing(failure: str) -> str:
    name, _, text = failure.partition(": ")
    return f"raise {name}({text!r})\n"


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_library_that_cannot_be_loaded_looks_missing_and_its_flags_are_refused_by_its_reason(installed, failure):
    installed("transformer_engine", "pytorch", failing(failure))
    installed("apex", "optimizers", failing(failure))
    hardware.hide_unusable(cuda=True)
    for name in ("transformer_engine", "transformer_engine.common", "apex", "apex.optimizers"):
        with pytest.raises(ModuleNotFoundError):
            __import__(name)
    with hardware.fake_device("cuda", {}):
        lines = hardware.unusable_libraries()
        for refused in (lambda: build.parts("transformer_engine"), lambda: _te_experts(None, None, None)):
            with pytest.raises(ConfigError) as error:
                refused()
            assert failure in str(error.value)
    assert [line.split(" is not used: ")[0] for line in lines] == ["Transformer Engine", "apex"]
    assert all(failure in line for line in lines)


def test_a_library_that_can_be_loaded_stays_and_apex_without_its_extensions_looks_missing(installed):
    installed("transformer_engine", "pytorch", "")
    installed("apex", "optimizers", "")
    hardware.hide_unusable(cuda=True)
    import transformer_engine.pytorch

    with hardware.fake_device("cuda", {}):
        assert hardware.have_transformer_engine() and transformer_engine.pytorch
        assert hardware.unusable_libraries() == [
            "apex is not used: it is installed and cannot be loaded: ModuleNotFoundError: No module named 'amp_C'"
        ]


def test_without_cuda_neither_is_loaded_and_one_that_the_program_has_loaded_stays(installed):
    installed("transformer_engine", "pytorch", "raise SystemExit")
    installed("apex", "optimizers", "")
    import apex.optimizers

    hardware.hide_unusable(cuda=False)
    assert sys.modules["transformer_engine"] is None and sys.modules["apex"] is apex
    assert not hardware.have_transformer_engine() and hardware.why_no_transformer_engine() == "there is no CUDA device"
    with hardware.fake_device("cuda", {}):
        assert "hidden" in hardware.why_no_transformer_engine()


def test_libraries_that_are_not_installed_are_no_news(installed):
    with hardware.fake_device("cuda", {}):
        assert hardware.unusable_libraries() == []
