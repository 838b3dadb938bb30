"""The pages in a browser: they ask for nothing, and write nothing to the console."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from screenshot import opened

from moetune.planning.figure import plan_chart
from moetune.planning.views import plan_view
from moetune.report.memory import memory_view
from moetune.report.memory_charts import memory_chart
from moetune.report.page import write_page
from tests.planning.test_figure import TRAINED, made
from tests.report.sample import sample

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")

BAD = '<img src="http://example.invalid/x.png"><script>console.error("boom")</script>'


@pytest.mark.slow
@pytest.mark.parametrize("page", ["report", "plan", pytest.param("bad", marks=pytest.mark.full)])
def test_a_page_opens_without_a_request_or_an_error(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    if page == "report":
        write_page(memory_view(sample()), file, [memory_chart(sample())])
    elif page == "plan":
        write_page(plan_view(made(TRAINED)), file, [plan_chart(made(TRAINED))])
    else:
        file.write_text(BAD, encoding="utf-8")
    asked, said = opened(file, tmp_path / "page.png")
    assert (bool(asked), bool(said)) == (page == "bad", page == "bad")
    assert (tmp_path / "page.png").stat().st_size > 5_000
