"""The three architectures as plain modules whose parameters carry the Hugging Face names.

They compute what the engine computes for ``qwen3``, ``gemma4`` and ``qwen35``; ``verify.py`` holds them against
transformers' own. They exist because training wants a fast gated delta net (the chunked form below needs one small
matrix product for each chunk in sequence, all else is batched) and a sliding window that is not a dense mask.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


class Norm(nn.Module):
    """Root mean square norm with a gain. ``weight`` is the gain itself; see ``export_state`` for families that store
    the gain less one."""

    def __init__(self, size: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((size,), gain))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Mlp(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = linear(size, inner), linear(size, inner), linear(inner, size)
        self.gelu = "hidden_activation" in config

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


# --- rotary positions -----------------------------------------------------------------------------------------------


def rope_tables(length: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [length, 1, pairs], for one frequency (radians per position) a pair."""
    angle = torch.arange(length, dtype=torch.float32, device=frequencies.device)[:, None] * frequencies
    return angle.cos()[:, None], angle.sin()[:, None]


def frequencies(pairs: int, base: float, device: torch.device, live: int | None = None) -> Tensor:
    """``pairs`` geometric frequencies; from ``live`` on they are zero (those pairs do not turn)."""
    values = base ** (-torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
    if live is not None:
        values[live:] = 0.0
    return values


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the first 2 * pairs dimensions of x [batch, time, heads, dim]; pair i is dimensions (i, i + pairs)."""
    cos, sin = tables
    pairs = cos.shape[-1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


# --- attention ------------------------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention. q [batch, time, heads, dim], k and v with fewer heads; result [batch, time, heads * dim].

    With a window, a query sees the ``window`` newest keys, itself among them; ``time`` is then a multiple of it
    (or no longer than it).
    """
    batch, time, heads, dim = q.shape
    if window is None or time <= window:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != heads)
        return out.transpose(1, 2).reshape(batch, time, heads * dim)
    blocks = time // window
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))

    def split(t: Tensor) -> Tensor:  # [blocks, batch * heads, window, dim]
        return t.view(batch, blocks, window, heads, dim).permute(1, 0, 3, 2, 4).reshape(blocks, batch * heads, window, dim)

    q, k, v = split(q), split(k), split(v)
    k, v = (torch.cat((torch.cat((torch.zeros_like(t[:1]), t[:-1])), t), dim=2) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=window_mask(blocks, window, q.device), scale=scale)
    out = out.view(blocks, batch, heads, window, dim).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, time, heads * dim)


def window_mask(blocks: int, window: int, device: torch.device) -> Tensor:
    """Which of [previous block, own block] a query sees, [blocks, 1, window, 2 * window]; block 0 has no previous."""
    row = torch.arange(window, device=device)[:, None]
    column = torch.arange(2 * window, device=device)[None]
    mask = (column <= row + window) & (column > row)
    mask = mask.expand(blocks, 1, window, 2 * window).clone()
    mask[0, :, :, :window] = False
    return mask


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys; ``gated`` doubles q_proj to [query | gate] for each head,
    ``value_norm`` norms the values too (without a gain), ``key_is_value`` makes them of the keys before their norm."""

    def __init__(
        self, config: dict, heads_kv: int, dim: int, *, window: int | None = None, gated: bool = False,
        value_norm: bool = False, key_is_value: bool = False, scale: float | None = None,
    ) -> None:
        super().__init__()
        size, heads, eps = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
        self.heads, self.dim, self.window, self.gated, self.value_norm = heads, dim, window, gated, value_norm
        self.scale = dim**-0.5 if scale is None else scale
        gain = 1.0 if scale is None else dim**-0.25  # keeps the first logits of one size in every family
        self.q_proj = linear(size, heads * dim * (2 if gated else 1))
        self.k_proj = linear(size, heads_kv * dim)
        self.v_proj = None if key_is_value else linear(size, heads_kv * dim)
        self.o_proj = linear(heads * dim, size)
        self.q_norm, self.k_norm = Norm(dim, eps, gain), Norm(dim, eps, gain)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, _ = x.shape
        q = self.q_proj(x)
        gate = None
        if self.gated:
            q, gate = q.view(batch, time, self.heads, 2 * self.dim).chunk(2, dim=-1)
            gate = gate.reshape(batch, time, -1)
        q = rotate(self.q_norm(q.reshape(batch, time, self.heads, self.dim)), tables)
        k = self.k_proj(x).view(batch, time, -1, self.dim)
        v = k if self.v_proj is None else self.v_proj(x).view(batch, time, -1, self.dim)
        k = rotate(self.k_norm(k), tables)
        if self.value_norm:
            v = F.rms_norm(v, (self.dim,), None, self.q_norm.eps)
        out = attend(q, k, v, self.scale, self.window)
        return self.o_proj(out if gate is None else out * torch.sigmoid(gate))


# --- gated delta net ------------------------------------------------------------------------------------------------


class _UnitLowerInverse(torch.autograd.Function):
    """Inverse of I + a for strictly lower triangular a [..., n, n]; d(inverse) = -inverse da inverse."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        inverse = torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.mT
        return -(turned @ grad @ turned)


class _Scan(torch.autograd.Function):
    """States before each chunk: s[0] = 0, s[i + 1] = m[i] s[i] + b[i]; all [chunks, rows, dim, dim]."""

    @staticmethod
    def forward(ctx, m: Tensor, b: Tensor) -> Tensor:
        states = torch.empty_like(b)
        states[0].zero_()
        for i in range(b.shape[0] - 1):
            torch.baddbmm(b[i], m[i], states[i], out=states[i + 1])
        ctx.save_for_backward(m, states)
        return states

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        m, states = ctx.saved_tensors
        total = torch.empty_like(states)
        total[-1] = grad[-1]
        for i in range(states.shape[0] - 2, -1, -1):
            torch.baddbmm(grad[i], m[i].mT, total[i + 1], out=total[i])
        grad_b = torch.cat((total[1:], torch.zeros_like(total[:1])))
        return grad_b @ states.mT, grad_b


def gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in chunks of 64: s = exp(decay) s; s += k (beta (v - k s)); out = q s.

    q, k, v are [batch, time, heads, dim] in float32, q already scaled; decay (log, <= 0) and beta [batch, time, heads].
    ``time`` is a multiple of 64. Inside a chunk the corrections solve a unit triangular system; from chunk to chunk
    the state obeys s' = m s + b, whose m and b need no state and are computed for all chunks at once.
    """
    batch, time, heads, dim = q.shape
    chunks = time // CHUNK

    def split(t: Tensor) -> Tensor:  # [chunks, batch * heads, CHUNK, ...]
        t = t.view(batch, chunks, CHUNK, heads, -1).permute(1, 0, 3, 2, 4)
        return t.reshape(chunks, batch * heads, CHUNK, -1)

    q, k, v = split(q), split(k), split(v)
    beta = split(beta)
    decay = split(decay).squeeze(-1).cumsum(dim=-1)
    row = torch.arange(CHUNK, device=q.device)
    past = row[:, None] >= row[None]
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~past, -1e4).exp()
    kb = k * beta
    inverse = _UnitLowerInverse.apply((kb @ k.mT * between).tril(-1))
    grown = decay.exp()[..., None]
    fresh = inverse @ (v * beta)
    reach = inverse @ (kb * grown)
    last = decay[..., -1:, None]
    late = k * (last - decay[..., None]).exp()
    eye = torch.eye(dim, dtype=q.dtype, device=q.device)
    states = _Scan.apply(last.exp() * eye - late.mT @ reach, late.mT @ fresh)
    out = (q * grown) @ states + (q @ k.mT * between) @ (fresh - reach @ states)
    out = out.view(chunks, batch, heads, CHUNK, dim).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, time, heads, dim)


def gated_delta_stepwise(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The same, one token after another; the reference for ``gated_delta``."""
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype, device=q.device)
    outs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        delta = (v[:, t] - (state * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * delta[:, :, None]
        outs.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outs, dim=1)


class _Conv(nn.Module):
    """Depthwise causal convolution over time with SiLU; ``weight`` [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))

    def forward(self, x: Tensor) -> Tensor:
        taps = self.weight.shape[-1]
        weight = self.weight[:, 0]
        padded = F.pad(x, (0, 0, taps - 1, 0))
        out = padded[:, : x.shape[1]] * weight[:, 0]
        for i in range(1, taps):
            out = torch.addcmul(out, padded[:, i : i + x.shape[1]], weight[:, i])
        return F.silu(out)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.heads_k, self.heads_v = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.dim = config["linear_key_head_dim"]
        keys, values = self.heads_k * self.dim, self.heads_v * self.dim
        self.in_proj_qkv, self.in_proj_z = linear(size, 2 * keys + values), linear(size, values)
        self.in_proj_b, self.in_proj_a = linear(size, self.heads_v), linear(size, self.heads_v)
        self.conv1d = _Conv(2 * keys + values, config["linear_conv_kernel_dim"])
        self.dt_bias = nn.Parameter(torch.empty(self.heads_v))
        self.A_log = nn.Parameter(torch.empty(self.heads_v))
        self.norm = Norm(self.dim, config["rms_norm_eps"])
        self.out_proj = linear(values, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        keys = self.heads_k * self.dim
        q, k, v = self.conv1d(self.in_proj_qkv(x)).split((keys, keys, self.heads_v * self.dim), dim=-1)
        repeat = self.heads_v // self.heads_k
        unit = lambda t: t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6)
        q = unit(q.float().view(batch, time, self.heads_k, self.dim)) * self.dim**-0.5
        k = unit(k.float().view(batch, time, self.heads_k, self.dim))
        v = v.float().view(batch, time, self.heads_v, self.dim)
        q, k = (t.repeat_interleave(repeat, dim=2) for t in (q, k))
        beta = torch.sigmoid(self.in_proj_b(x).float())
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        out = self.norm(gated_delta(q, k, v, decay, beta).to(x.dtype))
        out = out.reshape(batch, time, -1) * F.silu(self.in_proj_z(x))
        return self.out_proj(out)


# --- layers and models ----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Pre-norm block of the Qwen families; ``linear_attn`` or ``self_attn``."""

    def __init__(self, config: dict, *, recurrent: bool = False, gated: bool = False) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        self.recurrent = recurrent
        if recurrent:
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config, config["num_key_value_heads"], config["head_dim"], gated=gated)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, tables: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.linear_attn(normed) if self.recurrent else self.self_attn(normed, tables["full_attention"]))
        return x + self.mlp(self.post_attention_layernorm(x))


class GemmaLayer(nn.Module):
    """Sandwich-norm block of Gemma 4; ``kind`` is sliding_attention or full_attention."""

    def __init__(self, config: dict, kind: str) -> None:
        super().__init__()
        size, eps, self.kind = config["hidden_size"], config["rms_norm_eps"], kind
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(size, eps), Norm(size, eps)
        full = kind == "full_attention"
        heads_kv = config["num_global_key_value_heads" if full else "num_key_value_heads"]
        self.self_attn = Attention(
            config, heads_kv, config["global_head_dim" if full else "head_dim"],
            window=None if full else config["sliding_window"], value_norm=True,
            key_is_value=full and config["attention_k_eq_v"], scale=1.0,
        )
        self.mlp = Mlp(config)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, tables: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), tables[self.kind]))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Trunk(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
        if config["model_type"] == "gemma4_text":
            layers = [GemmaLayer(config, kind) for kind in kinds]
        else:
            gated = config.get("attn_output_gate", False)
            layers = [Layer(config, recurrent=kind == "linear_attention", gated=gated) for kind in kinds]
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])


class NextN(nn.Module):
    """The block that sees the trunk's state of one position before and the newest token."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.fc = linear(2 * size, size)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(size, eps), Norm(size, eps)
        self.layers = nn.ModuleList([Layer(config, gated=True)])
        self.norm = Norm(size, eps)


class LanguageModel(nn.Module):
    """Trunk, tied head and, where the configuration has one, the NextN block."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if config.get("mtp_num_hidden_layers"):
            self.mtp = NextN(config)
        self._tables: dict[tuple, dict] = {}

    def tables(self, length: int, like: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Rotary tables of each layer kind for ``length`` positions, kept for the next call."""
        key = (length, like.device, like.dtype)
        if key not in self._tables:
            rope, device = self.config["rope_parameters"], like.device
            if "full_attention" in rope:
                half, share = self.config["global_head_dim"] // 2, rope["full_attention"]["partial_rotary_factor"]
                made = {
                    "full_attention": frequencies(half, rope["full_attention"]["rope_theta"], device, int(half * share)),
                    "sliding_attention": frequencies(
                        self.config["head_dim"] // 2, rope["sliding_attention"]["rope_theta"], device
                    ),
                }
            else:
                pairs = int(self.config["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
                made = {"full_attention": frequencies(pairs, rope["rope_theta"], device)}
            self._tables[key] = {
                kind: tuple(t.to(like.dtype) for t in rope_tables(length, f)) for kind, f in made.items()
            }
        return self._tables[key]

    def hidden(self, ids: Tensor) -> Tensor:
        """Normed state after the last layer, [batch, time, hidden]; what the head and the NextN block read."""
        x = self.model.embed_tokens(ids)
        if self.config["model_type"] == "gemma4_text":
            x = x * math.sqrt(self.config["hidden_size"])
        tables = self.tables(ids.shape[1], x)
        for layer in self.model.layers:
            x = layer(x, tables)
        return self.model.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits in float32."""
        logits = F.linear(hidden, self.model.embed_tokens.weight).float()
        cap = self.config.get("final_logit_softcapping")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def draft(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """State of the NextN block: at position j it has seen hidden[j - 1] and ids[: j + 1] and predicts ids[j + 1].

        ``hidden`` is the trunk's state, or an earlier result of this method for the next draft of a chain.
        """
        before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        embedded = self.mtp.pre_fc_norm_embedding(self.model.embed_tokens(ids))
        x = self.mtp.fc(torch.cat((embedded, self.mtp.pre_fc_norm_hidden(before)), dim=-1))
        return self.mtp.norm(self.mtp.layers[0](x, self.tables(ids.shape[1], x)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


def initialise(model: LanguageModel, seed: int) -> None:
    """Seeded first weights: normal with the fan-in's scale, outputs of each block zero (behind a norm: small), slow to
    fast decays."""
    sandwich = model.config["model_type"] == "gemma4_text"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")) and not sandwich:
                parameter.zero_()
            elif sandwich and name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.fill_(0.25)
            elif name.endswith("embed_tokens.weight"):
                parameter.normal_(0.0, 0.02, generator=generator)
            elif name.endswith("conv1d.weight"):
                parameter.uniform_(-0.3, 0.3, generator=generator)
                parameter[..., -1] += 0.7
            elif name.endswith("A_log"):
                parameter.uniform_(1.0, 8.0, generator=generator).log_()
            elif name.endswith("dt_bias"):
                step = parameter.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
            elif parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)


def export_state(model: LanguageModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """``state`` as the family's checkpoints store it: Qwen 3.5 keeps each norm's gain less one, save the delta net's."""
    if model.config["model_type"] != "qwen3_5_text":
        return dict(state)
    return {
        name: value - 1.0 if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") else value
        for name, value in state.items()
    }
