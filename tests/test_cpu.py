"""The cores that a process may use, and the precision that a CPU computes in."""

import pytest

from glm4v_patched import cpu
from glm4v_patched.engine.options import choose_precision


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    for name in cpu.ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)
    cpu.has_bf16.cache_clear()
    yield
    cpu.has_bf16.cache_clear()


@pytest.mark.parametrize(
    ("machine", "line", "variables", "has_bf16"),
    [
        ("x86_64", "flags\t: fpu avx2 avx512f", {}, False),
        ("x86_64", "flags\t: fpu avx512_bf16", {}, True),
        ("x86_64", "flags\t: fpu amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, True),
        ("x86_64", "flags\t: avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        ("x86_64", "flags\t: avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
        ("x86_64", "flags\t: avx512_bf16", {"ATEN_CPU_CAPABILITY": "avx2"}, False),
        ("aarch64", "Features\t: fp asimd bf16", {"ATEN_CPU_CAPABILITY": "default"}, True),
        ("aarch64", "Features\t: fp asimd", {}, False),
        ("aarch64", "", {}, False),
    ],
)
def test_a_cpu_without_instructions_for_bf16_computes_in_fp32(
    tmp_path, monkeypatch, machine, line, variables, has_bf16
):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cpu.has_bf16() is has_bf16
    assert choose_precision(on_cpu=True)[0] == ("bf16" if has_bf16 else "fp32")
    assert choose_precision(on_cpu=False) == ("bf16", "")


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("150000 100000", 2), ("10000 100000", 1)]
)
def test_cores_are_those_whose_time_a_control_group_allows(tmp_path, monkeypatch, quota, expected):
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "cpu.max").write_text(f"{quota}\n")
    (tmp_path / "cgroup").write_text("0::/box\n")
    monkeypatch.setattr(cpu, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cpu, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert cpu.count_cores() == expected
