"""The allowed outcomes: which operators are refused and why, which must not fall back."""

from __future__ import annotations

from shardwise.testing import warn_of_unstable
from support.op_db.entries import entries
from support.op_db.outcomes import NOTHING, Row

_RESIZED = "the layout of a DTensor has its shape, which cannot change in place"
_DENSE = "DTensors, and tensors used with them, must be dense"
_MOVED = "refused only in place, and only where data would have to move"

REFUSED = {
    "resize_": _RESIZED,
    "resize_as_": _RESIZED,
    "to_sparse": _DENSE,
    "sparse.mm.reduce": _DENSE,
    "sparse.sampled_addmm": _DENSE,
    "squeeze": _MOVED,
    "as_strided": _MOVED,
    "as_strided.partial_views": _MOVED,
}
"""Operators that are refused in some case: why."""

SOME_VERSIONS = {
    "cholesky": (None, "2.14"),
    "qr": (None, "2.14"),
    "linalg.matrix_sqrth": ("2.14", None),
    "linalg.polar": ("2.14", None),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": ("2.14", None),
}
"""Operators that op_db has since a version of torch, and until another; of those supported here."""

FAMILIES = {
    "indexing": ["__getitem__", "index_select", "take", "take_along_dim", "gather", "index_fill"],
    "index_put": ["index_put", "index_add", "index_copy", "put"],
    "convolution": [
        *(f"nn.functional.conv{dims}d" for dims in (1, 2, 3)),
        *(f"nn.functional.conv_transpose{dims}d" for dims in (1, 2, 3)),
    ],
    "logsumexp": ["logsumexp", "logaddexp", "logaddexp2"],
    "dropout": [
        "nn.functional.dropout",
        "nn.functional.dropout2d",
        "nn.functional.dropout3d",
        "nn.functional.alpha_dropout",
        "nn.functional.feature_alpha_dropout.with_train",
        "nn.functional.feature_alpha_dropout.without_train",
    ],
    "random": [
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "normal",
        "normal.in_place",
        "normal.number_mean",
        "rand_like",
        "randint_like",
        "randn_like",
        "uniform",
    ],
    "scatter": [
        "scatter",
        "scatter_add",
        *(f"scatter_reduce.{how}" for how in ("sum", "prod", "mean", "amax", "amin")),
    ],
    "masks": [
        "masked_fill",
        "masked_scatter",
        "masked_select",
        "nonzero",
        "argwhere",
        "unique",
        "unique_consecutive",
    ],
    "search": ["searchsorted", "bucketize", "isin"],
    "equality": ["allclose", "equal", "isclose"],
    "padding": [
        f"nn.functional.pad.{mode}"
        for mode in ("constant", "reflect", "replicate", "replicate_negative", "circular")
    ],
    "patches": ["nn.functional.unfold", "unfold"],
    "as_strided": ["as_strided"],
    "quantiles": ["quantile", "nanquantile", "median", "nanmedian", "mode"],
    "splitting": ["tensor_split", "split", "chunk", "unbind"],
    "distances": ["cdist", "dist"],
    "stft": ["stft", "istft"],
    "complex": ["complex", "polar", "view_as_real", "view_as_complex"],
    "order": ["sort", "argsort", "topk", "kthvalue", "msort"],
    "running": ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"],
    "einsum": ["einsum"],
    "linalg norms": [
        "linalg.norm",
        "linalg.norm.subgradients_at_zero",
        "linalg.matrix_norm",
        "linalg.vector_norm",
        "norm",
        "norm.fro",
        "norm.nuc",
        "norm.inf",
    ],
    "repeating": ["repeat_interleave", "repeat", "tile"],
    "one_hot": ["nn.functional.one_hot"],
    "grid_sample": ["nn.functional.grid_sample", "grid_sampler_2d"],
    "counting": ["bincount", "histc", "histogram"],
}
"""Operators that must never fall back."""


def _has_tensors(name: str) -> bool:
    entry = entries()[name]
    is_for_gpus = name.startswith("jiterator_")
    return not is_for_gpus and any(entry.samples(dtype, 1) for dtype in entry.kinds())


def check(row: Row) -> None:
    """Raise if an outcome is not allowed, and warn of values that were not compared."""
    warn_of_unstable(row.name, row.unstable)
    shown = "\n".join([f"{row.name}: {row.outcome} {row.counts}", *row.texts])
    assert row.outcome != "wrong", shown
    assert row.outcome != "refused" or row.name in REFUSED, f"refused, for no known reason: {shown}"
    only_in_place = REFUSED.get(row.name) == _MOVED
    assert not only_in_place or set(row.refused) <= {"in place"}, (
        f"refused as {row.refused}: {shown}"
    )
    assert row.outcome != NOTHING or not _has_tensors(row.name), f"nothing was tried: {shown}"
    must = any(row.name in names for names in FAMILIES.values())
    assert not (must and "fallback" in row.counts), f"must not fall back: {shown}"
