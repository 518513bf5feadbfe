"""GGUF files: weights that are read, and one line for types and files that cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nsa_lab.config import ConfigError
from nsa_lab.convert import load_dense

gguf = pytest.importorskip("gguf", reason="pip install '.[convert]'")
pytest.importorskip("accelerate", reason="pip install '.[convert]'")

DIM, KEYS, HIDDEN, VOCAB = 32, 16, 64, 8
LAYER_SHAPES = {
    "attn_norm": (DIM,),
    "attn_q": (DIM, DIM),
    "attn_k": (KEYS, DIM),
    "attn_v": (KEYS, DIM),
    "attn_output": (DIM, DIM),
    "ffn_norm": (DIM,),
    "ffn_gate": (HIDDEN, DIM),
    "ffn_up": (HIDDEN, DIM),
    "ffn_down": (DIM, HIDDEN),
}
SHAPES = {"token_embd": (VOCAB, DIM), "output_norm": (DIM,), "output": (VOCAB, DIM)}
SHAPES |= {f"blk.0.{name}": shape for name, shape in LAYER_SHAPES.items()}


def write_model(path: Path) -> dict[str, np.ndarray]:
    """Write a Llama model with one layer and return its weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(DIM)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(KEYS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB)
    generator = np.random.default_rng(0)
    weights = {f"{name}.weight": generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def set_type(path: Path, name: str, quantization: int) -> None:
    """Replace the quantization type of a tensor: a number after its name, its number of dimensions and its shape."""
    content = bytearray(path.read_bytes())
    start = content.index(name.encode()) + len(name)
    start += 4 + 8 * int.from_bytes(content[start : start + 4], "little")
    content[start : start + 4] = quantization.to_bytes(4, "little")
    path.write_bytes(content)


def test_weights_are_read(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "model.gguf")
    model = load_dense(tmp_path / "model.gguf")
    state = model.state_dict()
    assert torch.equal(state["lm_head.weight"], torch.from_numpy(weights["output.weight"]))
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"], torch.from_numpy(weights["blk.0.ffn_up.weight"]))


def test_unknown_quantization_types_and_damaged_files_give_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    # 99 does not exist; Q8_1 (9) exists, and cannot be converted.
    for quantization in (99, 9):
        write_model(path)
        set_type(path, "blk.0.attn_q.weight", quantization)
        with pytest.raises(ConfigError, match=r"expected quantization types .* update gguf") as caught:
            load_dense(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    write_model(path)
    # Cut in the header, in the metadata, in the list of tensors, and in a tensor.
    cuts = [path.read_bytes()[:length] for length in (6, 24, 100, 800, 1500)]
    for content in (*cuts, b"", b"text" * 100):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="transformers cannot load it") as caught:
            load_dense(path)
        assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_not_replaced_by_random_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_output", b"blk.0.attn_outpux"))
    with pytest.raises(ConfigError, match=r"for model\.layers\.0\.self_attn\.o_proj\.weight"):
        load_dense(path)
