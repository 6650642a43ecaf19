"""``invoke build``: the main job."""

from __future__ import annotations

from pathlib import Path

from invoke.context import Context

from .. import assemble, variants
from .common import command, context, job_count


@command(
    help={
        "variant": "Which artifact: a name of variants/, or 'all' (default: universal).",
        "strict": "Refuse when a part is missing, instead of building what there is.",
        "plan": "Print the plan and stop.",
        "toolchain": "zig, native or cosmocc (default: what the variant says).",
        "jobs": "Compilers at once (default: as many as processor and memory allow).",
        "out": "Folder for the finished files (default: dist).",
    }
)
def build(c: Context, variant: str = "universal", strict: bool = False, plan: bool = False, toolchain: str = "", jobs: str = "", out: str = "") -> None:
    """Build an artifact: pins, patches, engines, host block, payload, papers. Does only what is not done yet."""
    made = context(c)
    known = variants.load(made.project.variants)
    chosen = [name for name in known if name != "native"] if variant == "all" else [variants.choose(known, variant).name]
    workers = job_count(jobs)
    target = Path(out).absolute() if out else made.project.dist
    for name in chosen:
        builder = assemble.Builder(made, toolchain=toolchain or known[name].toolchain, jobs=workers)
        if plan or made.dry_run:
            parts = builder.plan(known[name])
            parts.show(made.console)
            if strict:
                assemble.refuse_missing(parts)
            continue
        done = builder.artifact(known[name], strict=strict, out=target)
        what = "written" if done.changed else "already up to date"
        made.console.success(f"{done.path.name} {what}, sha256 {done.manifest.sha256}")
        print(done.path)
