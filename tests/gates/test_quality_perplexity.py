"""What the perplexity command prints, and the files it writes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from opencoti_build.errors import EngineError
from opencoti_build.gates.quality.perplexity import Difference, Reading, difference, parse, positions
from opencoti_build.gates.quality.plan import Batch

PRINTED = """\
kl_divergence: computing over 4 chunks, n_ctx=512, batch_size=512, n_seq=1
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p
   1      24.3021 ±    4.1090       0.00482 ±    0.00331       0.00213 ±    0.00016     1.404 ±  0.109 %    96.863 ±  1.094 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  31.120471 ±   2.914120
Mean PPL(base)                :  31.044208 ±   2.903331
Cor(ln(PPL(Q)), ln(PPL(base))):  99.94%

====== KL divergence statistics ======
Mean    KLD:   0.002411 ±   0.000103
Maximum KLD:   0.061730
99.9%   KLD:   0.043310
99.0%   KLD:   0.016112
Median  KLD:   0.001402

====== Token probability statistics ======
Same top p: 97.255 ± 0.512 %
"""


def test_the_statistics_are_read_from_the_output():
    found = parse(PRINTED, 1020, "engine")
    assert (found.positions, found.mean, found.mean_error, found.max, found.q999) == (1020, 0.002411, 0.000103, 0.061730, 0.043310)
    assert (found.top1, found.perplexity, found.reference_perplexity) == (pytest.approx(0.97255), 31.120471, 31.044208)


@pytest.mark.parametrize("line", ["Mean    KLD", "Maximum KLD", "99.9%   KLD", "Same top p:", "Mean PPL(Q)", "Mean PPL(base)"])
def test_a_missing_figure_is_an_error_that_shows_the_output(line):
    text = "\n".join(one for one in PRINTED.splitlines() if not one.startswith(line))
    with pytest.raises(EngineError, match="the engine perplexity did not print") as caught:
        parse(text, 1020, "the engine")
    assert "chunk" in caught.value.details


def test_a_figure_that_is_no_number_is_an_error():
    with pytest.raises(EngineError, match="no number"):
        parse(PRINTED.replace("0.061730", "******"), 1020, "engine")


def test_not_a_number_is_read_and_no_bound_holds_for_it():
    assert parse(PRINTED.replace("  0.002411 ±", "       nan ±"), 1020, "engine").mean != 0


def logits(path: Path, values: list[int], *, context: int = 8, vocabulary: int = 3, chunks: int = 2, tokens: int = 5) -> Path:
    """A file of the command; ``values`` has the first value of every row."""
    rows = b"".join(struct.pack("<ff4H", 0.5, -9.0, value, 1, 2, 0) for value in values)
    path.write_bytes(b"_logits_" + struct.pack("<Iii", context, vocabulary, chunks) + struct.pack(f"<{context * chunks}i", *[tokens] * (context * chunks)) + rows)
    return path


def test_equal_files_do_not_differ(tmp_path):
    one, two = logits(tmp_path / "1", [1, 2, 3, 4, 5, 6]), logits(tmp_path / "2", [1, 2, 3, 4, 5, 6])
    assert positions(8) == 3
    assert difference(one, two) == Difference(6, 0, None)


def test_differing_rows_are_counted_and_the_first_is_named(tmp_path):
    one, two = logits(tmp_path / "1", [1, 2, 3, 4, 5, 6]), logits(tmp_path / "2", [1, 2, 3, 4, 9, 9])
    # Rows 4 and 5 are the second and third of chunk 1, whose rows begin at token 4.
    assert difference(one, two) == Difference(6, 2, (1, 5))


@pytest.mark.parametrize("change", [{"tokens": 6}, {"context": 16, "values": [0] * 14}, {"chunks": 1, "values": [1, 2, 3]}, {"vocabulary": 4}])
def test_files_about_different_texts_are_not_compared(tmp_path, change):
    values = change.pop("values", [1, 2, 3, 4, 5, 6])
    one, two = logits(tmp_path / "1", [1, 2, 3, 4, 5, 6]), logits(tmp_path / "2", values, **change)
    with pytest.raises(EngineError, match="different texts"):
        difference(one, two)


@pytest.mark.parametrize("keep", [0, 10, 19, 60, -1])
def test_a_file_that_is_cut_off_is_an_error(tmp_path, keep):
    one, two = logits(tmp_path / "1", [1, 2, 3, 4, 5, 6]), logits(tmp_path / "2", [1, 2, 3, 4, 5, 6])
    two.write_bytes(two.read_bytes()[:keep])
    with pytest.raises(EngineError):
        difference(one, two)


def test_decoding_reads_token_by_token_and_sequences_share_a_batch():
    def batch(reading: Reading) -> str:
        flags = reading.flags()
        return flags[flags.index("--batch-size") + 1]

    assert batch(Reading(512, 4, Batch.DECODE, 1, 2)) == "1"
    assert batch(Reading(512, 4, Batch.PROMPT, 1, 2)) == "512"
    assert batch(Reading(512, 8, Batch.PROMPT, 4, 2)) == "2048"
    assert Reading(512, 8, Batch.PROMPT, 4, 2).positions == 8 * 255
