"""The model zoo: its data, the numbers and blocks it is made of, and the files, read back with gguf-py of the base."""

from __future__ import annotations

import hashlib
import io
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invoke.context import Context

from opencoti_build.cache import Cache, default_root
from opencoti_build.cli.common import CommandContext
from opencoti_build.console import Console, Mode
from opencoti_build.errors import DataError, DiskError, OpencotiError, UsageError
from opencoti_build.project import find_project
from opencoti_build.runner import SystemRunner

np = pytest.importorskip("numpy")

from opencoti_build.gates import zoo
from opencoti_build.gates.zoo import blocks, fill, library, mixes, shapes, vocabulary
from opencoti_build.gates.zoo.architectures import Random, Tensor

ZOO = find_project().root / "gate" / "zoo.yaml"
MODELS = zoo.load(ZOO)
GATE = [model for model in MODELS if model.group is zoo.Group.GATE]
SPEED = [model for model in MODELS if model.group is zoo.Group.SPEED]


def named(name: str) -> zoo.ZooModel:
    return next(model for model in MODELS if model.name == name)


@pytest.fixture(scope="module")
def gguf() -> Any:
    """gguf-py of the base, if its tree is on this machine."""
    project = find_project()
    console = Console(io.StringIO(), mode=Mode.QUIET)
    workshop = CommandContext(project=project, console=console, runner=SystemRunner(), cache=Cache(default_root()), offline=True, dry_run=False)
    try:
        return library.load(zoo.gguf_folder(workshop))
    except OpencotiError as error:
        pytest.skip(f"the base's tree is not here: {error}")


# ---- data -----------------------------------------------------------------------------------------------------------------------


def test_the_zoo_has_every_architecture_in_a_full_and_a_quantised_form():
    forms: dict[str, set[str]] = {}
    for model in GATE:
        forms.setdefault(model.architecture, set()).add(model.mix.name)
    wanted = {"llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "gemma3", "gemma4", "gemma4-assistant", "mamba2"}
    assert wanted <= set(forms)
    assert all({"F16", "Q8_0"} <= found for found in forms.values())
    assert len({model.name for model in MODELS}) == len(MODELS)


@pytest.mark.parametrize("model", [model for model in GATE if not model.is_drafter], ids=lambda model: model.name)
def test_gate_models_are_small_but_deep_and_long_enough(model):
    assert 8 <= model.shape.layers <= 12
    assert model.shape.context >= 4096
    assert 64 <= model.shape.hidden <= 256
    assert zoo.data_size(model) < 64 << 20


# Billions of parameters that the models' publishers state for the language model, without NextN blocks and counting tied matrices once.
@pytest.mark.parametrize(("family", "billions"), [("qwen2.5-14b-1m", 14.7), ("qwen3-1.7b", 1.7), ("gemma3-1b", 1.0), ("gemma3-4b", 3.9), ("gemma4-26b-a4b", 25.2), ("gemma4-31b", 30.7)])
def test_speed_models_have_as_many_parameters_as_the_real_ones(family, billions):
    model = next(model for model in SPEED if model.family == family)
    assert zoo.plan(model).parameters / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize(("family", "low", "high"), [("qwen3.5-27b", 26.5, 28.0), ("qwen3.5-35b-a3b", 34.5, 36.0)])
def test_hybrid_speed_models_have_the_size_in_their_names(family, low, high):
    model = next(model for model in SPEED if model.family == family)
    assert low < zoo.plan(model).parameters / 1e9 < high


def test_the_shared_layers_of_gemma4_read_layers_of_their_own_kind():
    # llama-model.cpp takes the last two layers with keys of their own, the drafter the last two layers: sliding, then full.
    shape = named("gemma4-f16").shape
    own = [layer for layer in range(shape.layers) if shape.has_kv(layer)]
    assert [shape.slides(layer) for layer in own[-2:]] == [True, False]
    assert [shape.slides(layer) for layer in range(shape.layers)][-2:] == [True, False]
    drafter = named("gemma4-assistant-f16").shape
    for layer in range(drafter.layers):
        twin = shape.layers - (2 if drafter.slides(layer) else 1)
        assert drafter.head_size(layer) == shape.head_size(twin)
        assert drafter.kv_heads(layer) == shape.kv_heads(twin)


MINIMAL = """
mixes: {F16: {file_type: MOSTLY_F16, type: F16}}
fallbacks: {Q4_K: Q5_0}
models:
  a:
    group: gate
    architecture: llama
    about: x
    source: y
    forms: [F16]
    shape: {layers: 2, context: 64, hidden: 64, vocabulary: 272, feed_forward: 64, epsilon: 1.0e-5, tied: false, attention: {heads: 2, kv_heads: 1, head_size: 32, rope_base: 10000}}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("forms: [F16]", "forms: [F17]", "'F17' is not known"),
        ("group: gate", "group: gates", "did you mean 'gate'"),
        ("layers: 2", "layers: two", "expected a whole number"),
        ("hidden: 64", "hiden: 64", "'hidden' is missing"),
        ("epsilon: 1.0e-5", "epsilon: 1e-5", "positive number"),
        ("heads: 2, kv_heads: 1", "heads: 3, kv_heads: 2", "evenly"),
        (", attention: {heads: 2, kv_heads: 1, head_size: 32, rope_base: 10000}", "", "'attention' or 'recurrent'"),
        ("rope_base: 10000}", "rope_base: 10000}, window: {size: 8, pattern: SX, stated: true, rope_base: 1}", "sliding"),
        ("rope_base: 10000}", "rope_base: 10000}, shared_kv: 2", "some must have keys"),
        ("source: y", "source: y\n    target: b", "no model 'b'"),
        ("type: F16}", "type: F16, rules: [{tensors: [OUTPUT], type: Q6_K, place: last}]}", "'last' is not known"),
    ],
)
def test_wrong_data_is_refused_with_its_place(old, new, said):
    assert shapes.parse(MINIMAL, "zoo.yaml")[0].name == "a-f16"
    assert old in MINIMAL
    with pytest.raises(DataError, match="zoo.yaml: ") as caught:
        shapes.parse(MINIMAL.replace(old, new), "zoo.yaml")
    assert said in caught.value.message


def test_an_architecture_without_a_writer_is_named():
    model = replace(shapes.parse(MINIMAL, "zoo.yaml")[0], architecture="gpt2")
    with pytest.raises(DataError, match="no writer for 'gpt2'"):
        zoo.plan(model)


def test_models_are_chosen_by_file_family_or_group():
    assert {model.group for model in zoo.choose(MODELS, None)} == {zoo.Group.GATE}
    assert [model.name for model in zoo.choose(MODELS, ["qwen2", "llama-f16", "qwen2-f16"])] == ["qwen2-f16", "qwen2-q8_0", "llama-f16"]
    with pytest.raises(UsageError, match="Did you mean 'qwen35moe"):
        zoo.choose(MODELS, ["qwen35mo"])


# ---- mixes ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_rows_are_whole_blocks(model):
    tensors = zoo.plan(model).tensors
    for tensor, type_name in zip(tensors, mixes.types_of(model, tensors), strict=True):
        if type_name in blocks.FORMATS:
            assert tensor.shape[0] % blocks.FORMATS[type_name].weights == 0
            assert tensor.kept is None


def test_the_middle_mix_spends_more_bits_where_the_quantizer_does():
    model = named("qwen2.5-14b-1m-q4_k_m")
    tensors = zoo.plan(model).tensors
    types = {(tensor.tensor, tensor.layer): kind for tensor, kind in zip(tensors, mixes.types_of(model, tensors), strict=True) if tensor.suffix == "weight"}
    assert types["OUTPUT", None] == "Q6_K"
    assert types["TOKEN_EMBD", None] == "Q4_K"
    more = [layer for layer in range(48) if types["FFN_DOWN", layer] == "Q6_K"]
    # An eighth of 48 at both ends, and every third of the 36 between.
    assert more == [*range(6), *range(8, 42, 3), *range(42, 48)]
    assert Counter(types["ATTN_V", layer] for layer in range(48)) == {"Q6_K": 24, "Q4_K": 24}


def test_rows_that_fit_no_large_block_fall_back():
    model = named("gemma4-26b-a4b-q4_k_m")
    tensors = zoo.plan(model).tensors
    types = {tensor.tensor: kind for tensor, kind in zip(tensors, mixes.types_of(model, tensors), strict=True) if tensor.layer in (None, 6) and tensor.suffix == "weight"}
    assert types["FFN_DOWN_EXP"] == "Q5_0"  # rows of 704
    assert types["FFN_GATE_UP_EXP"] == "Q4_K"  # rows of 2816
    assert types["FFN_GATE_INP"] == "F32"
    assert types["TOKEN_EMBD"] == "Q6_K"


# ---- numbers --------------------------------------------------------------------------------------------------------------------


def philox(key: int, count: int) -> list[int]:
    """Philox 4x64-10 from its paper; the counter starts at 1, as numpy counts before it draws."""
    mask = (1 << 64) - 1
    found: list[int] = []
    counter = 1
    while len(found) < count:
        x = [counter & mask, 0, 0, 0]
        k0, k1 = key & mask, key >> 64
        for _ in range(10):
            left, right = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [(right >> 64) ^ x[1] ^ k0, right & mask, (left >> 64) ^ x[3] ^ k1, left & mask]
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        found += x
        counter += 1
    return found[:count]


def test_numbers_are_those_of_plain_python_bit_by_bit():
    deviation = 0.0625
    tensor = Tensor("ATTN_Q", 0, "weight", (64, 3), Random(deviation), None)
    (made,) = fill.pieces("family", "blk.0.attn_q.weight", tensor, "F16", exact=True, quantize=None)
    key = int.from_bytes(hashlib.sha256(b"opencoti zoo\0family\0blk.0.attn_q.weight").digest()[:16], "little")
    (factor,) = struct.unpack("<f", struct.pack("<f", deviation / math.sqrt(4 * (65536**2 - 1) / 12)))
    expected = b""
    for word in philox(key, 192):
        total = sum((word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65535
        # The product of two single-precision numbers is exact in double precision; packing rounds it once, and once more to half.
        (single,) = struct.unpack("<f", struct.pack("<f", total * factor))
        expected += struct.pack("<e", single)
    assert made.tobytes() == expected


def test_every_tensor_has_numbers_of_its_own():
    tensor = Tensor("ATTN_Q", 0, "weight", (64, 64), Random(1.0), None)
    made = {next(fill.pieces(family, name, tensor, "F32", exact=True, quantize=None)).tobytes() for family in ("a", "b") for name in ("x", "y")}
    assert len(made) == 4


def test_pieces_join_to_the_same_bytes_whatever_their_size(monkeypatch):
    tensor = Tensor("ATTN_Q", 0, "weight", (512, 24), Random(0.02), None)

    def whole(type_name: str) -> bytes:
        return b"".join(piece.tobytes() for piece in fill.pieces("a", "b", tensor, type_name, exact=False, quantize=None))

    once = {name: whole(name) for name in ("F16", "Q4_K", "IQ2_S", "Q5_0")}
    monkeypatch.setattr(fill, "CHUNK", 1024)
    assert {name: whole(name) for name in once} == once


@pytest.mark.parametrize("name", blocks.FORMATS)
@pytest.mark.parametrize("deviation", [0.004, 0.05, 1.0])
def test_random_blocks_are_weights_of_the_wanted_deviation(gguf, name, deviation):
    kind = blocks.FORMATS[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.weights, kind.size)
    words = np.random.Philox(key=7).random_raw(400_000 // kind.weights * kind.words).reshape(-1, kind.words)
    made = blocks.random_blocks(kind, words, deviation)
    weights = gguf.quants.dequantize(made, gguf.GGMLQuantizationType[name]).ravel()
    assert np.isfinite(weights).all()
    assert float(weights.std()) == pytest.approx(deviation, rel=0.03)
    assert abs(float(weights.mean())) < 0.02 * deviation
    assert len(np.unique(made, axis=0)) == len(made)


@settings(max_examples=30, deadline=None)
@given(key=st.integers(0, (1 << 128) - 1), deviation=st.floats(1e-3, 4.0))
def test_no_random_bits_make_a_scale_that_is_no_number(key, deviation):
    for name, at in (("Q4_K", (0, 2)), ("Q6_K", (208,)), ("IQ2_XXS", (0,)), ("Q8_0", (0,)), ("Q2_K", (80, 82))):
        kind = blocks.FORMATS[name]
        made = blocks.random_blocks(kind, np.random.Philox(key=key).random_raw(64 * kind.words).reshape(-1, kind.words), deviation)
        for offset in at:
            scales = made[:, offset : offset + 2].copy().view("<f2")
            assert np.isfinite(scales).all()
            assert (scales != 0).all()


# ---- vocabulary -----------------------------------------------------------------------------------------------------------------


def test_every_byte_has_a_token_and_its_value_is_the_number():
    listed = vocabulary.tokens(vocabulary.SIZE)
    assert len({token.text for token in listed}) == len(listed) == 272
    assert [listed[ord(letter)].text for letter in "aZ~"] == ["a", "Z", "~"]
    # A space and a line feed look like this in byte-level BPE.
    assert (listed[0x20].text, listed[0x0A].text) == ("\u0120", "\u010a")
    assert listed[vocabulary.token_id("<bos>")].text == "<bos>"
    assert {token.type for token in listed[:256]} == {"NORMAL"}


def test_a_real_vocabulary_size_is_filled_up():
    listed = vocabulary.tokens(5000)
    assert len({token.text for token in listed}) == 5000
    assert {token.type for token in listed[272:]} == {"UNUSED"}
    with pytest.raises(DataError, match="too small"):
        vocabulary.tokens(271)


# ---- files ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(gguf, tmp_path_factory) -> Iterator[dict[str, Any]]:
    """Some models, written and read."""
    folder = tmp_path_factory.mktemp("zoo")
    yield {name: gguf.GGUFReader(zoo.write(named(name), folder, gguf=gguf)) for name in ("qwen3-f16", "qwen3-q8_0", "qwen3-iq2_m", "gemma4-f16")}


@pytest.mark.parametrize("name", ["qwen3-f16", "qwen3-q8_0", "qwen3-iq2_m", "gemma4-f16"])
def test_a_file_holds_what_the_plan_says(written, name):
    model, reader = named(name), written[name]
    plan = zoo.plan(model)
    types = mixes.types_of(model, plan.tensors)
    assert [tuple(int(n) for n in tensor.shape) for tensor in reader.tensors] == [tensor.shape for tensor in plan.tensors]
    assert [tensor.tensor_type.name for tensor in reader.tensors] == list(types)
    assert sum(int(tensor.n_bytes) for tensor in reader.tensors) == zoo.data_size(model)
    assert reader.fields["general.architecture"].contents() == model.architecture
    assert reader.fields[f"{model.architecture}.block_count"].contents() == model.shape.blocks


@pytest.mark.parametrize("model", [next(m for m in GATE if m.family == family) for family in dict.fromkeys(m.family for m in GATE)], ids=lambda model: model.family)
def test_the_loader_reads_every_key(gguf, tmp_path, model):
    """Each key of a file has an enumerator in the base, and the base's loader asks for it, in general or for the architecture."""
    sources = Path(gguf.__file__).parents[2] / "src"
    names = dict(re.findall(r'\{ (LLM_KV_\w+),\s*"([^"]+)"', (sources / "llama-arch.cpp").read_text("utf-8")))
    enumerators = {text.replace("%s", model.architecture): enumerator for enumerator, text in names.items()}
    everything = (sources / "llama-model.cpp").read_text("utf-8")
    general = everything[everything.index("void llama_model_base::load_hparams(") : everything.index("void llama_model_base::load_vocab(")]
    template = everything[everything.index("llama_model_chat_template(") :]
    others = [sources / "llama-vocab.cpp", sources / "llama-model-loader.cpp", sources / "models" / f"{model.architecture}.cpp"]
    read = " ".join([general, template, *(path.read_text("utf-8") for path in others)])
    reader = gguf.GGUFReader(zoo.write(model, tmp_path, gguf=gguf))
    keys = [name for name in reader.fields if not name.startswith("GGUF.")]
    assert len(keys) > 15
    unread = [key for key in keys if key not in enumerators or not re.search(rf"\b{enumerators[key]}\b", read)]
    assert unread == []


def test_the_window_pattern_is_an_array_of_flags(written):
    fields = written["gemma4-f16"].fields
    assert fields["gemma4.attention.sliding_window_pattern"].contents() == [letter == "S" for letter in "SFSSFSSFSFSF"]
    assert fields["gemma4.attention.head_count_kv"].contents() == [2 if letter == "S" else 1 for letter in "SFSSFSSFSFSF"]


def test_the_quantised_form_has_the_weights_of_the_full_one(gguf, written):
    full = {tensor.name: tensor for tensor in written["qwen3-f16"].tensors}
    for tensor in written["qwen3-q8_0"].tensors:
        reference = full[tensor.name].data.astype(np.float32).reshape(-1)
        if tensor.tensor_type.name == "F32":
            assert (tensor.data.reshape(-1) == reference).all()
            continue
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        step = np.abs(reference.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
        # Half a step, and what rounding the step to half precision adds at 127 steps.
        assert (np.abs(weights - reference).reshape(-1, 32) <= (0.5 + 127 / 2048) * step).all()


def test_a_second_run_writes_the_same_bytes_and_no_path(gguf, tmp_path):
    model = named("mamba2-q8_0")
    first = zoo.write(model, tmp_path / "one", gguf=gguf).read_bytes()
    second = zoo.write(model, tmp_path / "another place", gguf=gguf).read_bytes()
    assert first == second
    assert str(tmp_path).encode() not in first


def test_a_run_that_ends_in_the_middle_leaves_nothing(gguf, tmp_path):
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo.write(named("qwen3-f16"), tmp_path, gguf=gguf, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte(gguf, tmp_path):
    model, seen = named("llama-q4_k_m"), []
    zoo.write(model, tmp_path, gguf=gguf, progress=seen.append)
    assert sum(seen) == zoo.data_size(model)


def test_a_model_that_does_not_fit_is_refused_before_a_byte_is_written(gguf, tmp_path):
    huge = replace(named("llama-f16"), shape=replace(named("llama-f16").shape, vocabulary=1 << 34))
    with pytest.raises(DiskError, match="GiB left and the model needs"):
        zoo.write(huge, tmp_path, gguf=gguf)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_gguf_py_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no gguf-py"):
        library.load(tmp_path)


def test_the_cache_key_follows_data_and_library(tmp_path):
    from opencoti_build.gates.zoo.provide import cache_key

    model = named("llama-f16")
    other = replace(model, shape=replace(model.shape, context=model.shape.context + 1))
    keys = {cache_key(model, "a"), cache_key(model, "b"), cache_key(other, "a"), cache_key(named("llama-q8_0"), "a")}
    assert len(keys) == 4
    assert cache_key(replace(model, about="other words"), "a") == cache_key(model, "a")


# ---- commands -------------------------------------------------------------------------------------------------------------------


def test_the_list_shows_every_model(capsys):
    from opencoti_build.cli import gate_models

    gate_models.models(Context(), list=True)
    shown = capsys.readouterr().out
    assert all(model.name in shown for model in MODELS)


def test_the_program_writes_models_without_the_rest_of_the_toolkit(gguf, tmp_path, capsys):
    from opencoti_build.gates.zoo.__main__ import main

    gguf_py = Path(gguf.__file__).parents[1]
    assert main(["mamba2-f16", "--out", str(tmp_path), "--gguf-py", str(gguf_py)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "mamba2-f16.gguf")]
    assert main(["mamba3", "--out", str(tmp_path), "--gguf-py", str(gguf_py)]) == UsageError.exit_code
    assert "Did you mean 'mamba2" in capsys.readouterr().err
