"""Files that are written atomically, and the temporary files that killed writers leave."""

import os
from pathlib import Path

from moetune.files import lock, write_whole


def test_what_a_killed_writer_left_is_swept_by_the_next(tmp_path: Path) -> None:
    """Files stay that are locked, or not named as moetune's temporary files."""
    names = [
        ".moetune-" + "0" * 16,
        ".moetune-" + "2" * 16,
        ".moetune-0",
        ".moetune-x" + "0" * 15,
    ]
    for name in names:
        (tmp_path / name).write_text("half")
    (tmp_path / (".moetune-" + "3" * 16)).symlink_to(tmp_path / names[2])
    held = lock(tmp_path / names[1], "r+b")
    write_whole(tmp_path / "page.html", "whole")
    assert held is not None
    held.close()
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], ".moetune-" + "3" * 16, "page.html"])
    write_whole(tmp_path / "page.html", "again")
    assert not (tmp_path / names[1]).exists()
    assert (tmp_path / "page.html").read_text() == "again"
