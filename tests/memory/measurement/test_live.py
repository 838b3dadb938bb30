"""Who else is on a card, as nvidia-smi lists it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moetune.memory.measurement.live import Process, processes_on

LISTED = """GPU-11-aa, 41, 1024, /usr/bin/python, with a comma
GPU-22-bb, 42, 512, elsewhere
GPU-11-aa, 43, [N/A], hidden
No devices were found
"""


@pytest.mark.parametrize(("ends", "found"), [(0, [Process(41, "/usr/bin/python, with a comma", 1 << 30)]), (9, [])])
def test_processes(ends: int, found: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\nexit {ends}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="11-aa"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert processes_on(torch.device("cuda", 0)) == found


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processes_on(torch.device("cuda", 0)) == []
