"""The gate "off means off" on the real trees: the series passes it, and a change of one place is caught and named.

The planted changes are made in a copy of the patched tree and built where the gate builds the patched probe, so that each costs the
compilation of one file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from opencoti_build.cli.common import CommandContext
from opencoti_build.gates.off import Finding, Off, Report, subjects, wishes
from opencoti_build.series.base import tree_id_of
from opencoti_build.sources import Tree, Upstream

pytest.importorskip("numpy", reason="the zoo needs it; the test extra brings it: pip install -e '.[test]'")

MODEL = "qwen2-f16"
CONFIG = "fa=on,kv=split,k=f16,v=f16,seq=4,mtp=off,threads=1"


@dataclass(frozen=True)
class Plant:
    """A change of one place: ``old`` stands once in ``file``. ``aspects`` have to differ, and the first finding of ``aspect`` names ``place``."""

    name: str
    file: str
    old: str
    new: str
    aspect: str
    place: str
    patched: str
    aspects: frozenset[str]


PLANTS = (
    # The values stay what they are: only the graph tells.
    Plant(
        "an extra node",
        "src/llama-graph.cpp",
        "        ggml_prec_set_acc(cur, GGML_PREC_F32);\n\n        if (v_mla) {",
        "        ggml_prec_set_acc(cur, GGML_PREC_F32);\n        cur = ggml_scale(ctx0, cur, 1.0f);\n\n        if (v_mla) {",
        aspect="reserved",
        place="of 'prompt'",
        patched="an extra SCALE",
        aspects=frozenset({"reserved", "computed"}),
    ),
    # The last bit of the scale of the attention.
    Plant(
        "a changed op parameter",
        "src/llama-graph.cpp",
        "        cur = ggml_flash_attn_ext(ctx0, q, k, v, kq_mask, kq_scale, hparams.f_max_alibi_bias,",
        "        cur = ggml_flash_attn_ext(ctx0, q, k, v, kq_mask, kq_scale*(1.0f + 1.2e-7f), hparams.f_max_alibi_bias,",
        aspect="reserved",
        place="FLASH_ATTN_EXT",
        patched="'",
        aspects=frozenset({"reserved", "computed"}),
    ),
    # One bit of one element, for batches alone.
    Plant(
        "a changed mask value",
        "src/llama-kv-cache.cpp",
        '    //LLAMA_LOG_ERROR("%s: kq mask time: %0.3f ms\\n", __func__, (t_end - t_start)/1000.0);\n',
        "    if (n_tokens > 8) { ((uint8_t *) dst->data)[2*ggml_element_size(dst)] ^= 1; }\n",
        aspect="inputs",
        place="value [2, 0]",
        patched="",
        aspects=frozenset({"inputs"}),
    ),
    # One bit of one position, in the blob of all sequences alone.
    Plant(
        "a changed state blob",
        "src/llama-kv-cache.cpp",
        "            const llama_pos pos     = cells.pos_get(i);\n            const uint32_t n_seq_id",
        "            const llama_pos pos     = cells.pos_get(i) ^ (seq_id == -1 && i == 3 ? 1 : 0);\n            const uint32_t n_seq_id",
        aspect="state",
        place="all after decode, byte",
        patched="",
        aspects=frozenset({"state"}),
    ),
    Plant(
        "a changed default",
        "src/llama-context.cpp",
        "        /*.swa_full                    =*/ true,",
        "        /*.swa_full                    =*/ false,",
        aspect="defaults",
        place="llama_context_params.swa_full",
        patched="false",
        aspects=frozenset({"defaults"}),
    ),
    Plant(
        "a changed flag of the server",
        "common/arg.cpp",
        "        params.n_parallel = -1;     // auto by default\n",
        "        params.n_parallel = 4;      // auto by default\n",
        aspect="defaults",
        place="server common_params.n_parallel",
        patched="4",
        aspects=frozenset({"defaults"}),
    ),
)


@pytest.fixture(scope="module")
def copy(workshop: CommandContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("planted") / "tree"
    shutil.copytree(Upstream.load(workshop).tree().path, folder, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    yield folder
    shutil.rmtree(folder)


def gate(workshop: CommandContext, tree: Tree | None = None) -> Report:
    return Off(workshop, subjects(workshop, [MODEL]), wishes(CONFIG), patched=tree).run()


def test_the_series_changes_nothing_when_it_is_off(workshop: CommandContext) -> None:
    report = gate(workshop)
    assert report.holds, [finding.text for finding in report.findings]
    assert [(item.model, item.run, item.refused) for item in report.models] == [(MODEL, 1, 0)]
    assert report.pristine != report.patched
    assert "CPU" in report.backend


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_change_is_caught_and_named(workshop: CommandContext, copy: Path, plant: Plant) -> None:
    path = copy / plant.file
    before = path.read_text("utf-8")
    assert before.count(plant.old) == 1, "the base has changed there: plant it elsewhere"
    path.write_text(before.replace(plant.old, plant.new), "utf-8")
    try:
        report = gate(workshop, Tree(copy, tree_id_of(copy)))
    finally:
        path.write_text(before, "utf-8")
    found: list[Finding] = [finding for finding in report.findings if finding.aspect == plant.aspect]
    assert not report.holds and found, [finding.text for finding in report.findings]
    assert plant.aspects <= {finding.aspect for finding in report.findings}
    assert plant.place in found[0].place and plant.patched in found[0].patched, found[0].text
    if plant.aspect != "defaults":
        assert (found[0].model, found[0].configuration) == (MODEL, CONFIG)
    assert found[0].pristine != found[0].patched
