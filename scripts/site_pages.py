"""Hooks of mkdocs: README.md is the first page of the site, and what it links to outside of docs/ is part of it."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {"README.md": "index.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md, and the files of the repository that such pages link to."""
    root, added, waiting = Path(config.config_file_path).parent, set[str](), ["README.md"]
    while waiting:
        source = waiting.pop()
        added.add(source)
        content = (root / source).read_text(encoding="utf-8")
        if source.endswith(".md"):
            content = content.replace("](docs/", "](").replace("](../docs/", "](../")
            content = content.replace("](README.md", "](index.md")
            linked = {link for link in re.findall(r"\]\(([^)#:]+)", content) if (root / link).is_file()}
            waiting += sorted(linked - added - set(waiting))
        files.append(File.generated(config, PAGES.get(source, source), content=content))
    for script in sorted(root.glob("findings/*.sh")):
        files.append(File.generated(config, f"findings/{script.name}", content=script.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leaves out what stands behind the language of a block of code: names of files, which tests read. Pages of docs/
    are one folder higher here than in the repository."""
    markdown = markdown.replace("](../findings/", "](findings/").replace("](../../", "](../")
    return re.sub(r"^(```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)
