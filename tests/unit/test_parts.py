"""The ordinary tensors that hold the memory of one of another layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from segue.graph.state import parts_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")

MATRIX = torch.tensor([[0.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0], [4.0, 0.0, 5.0, 0.0]])

WHOLE: dict[str, tuple[torch.Tensor, Callable[..., torch.Tensor]]] = {
    "coo": (MATRIX.to_sparse(), lambda i, v: torch.sparse_coo_tensor(i, v, (4, 4)).to_dense()),
    "csr": (MATRIX.to_sparse_csr(), lambda c, i, v: torch.sparse_csr_tensor(c, i, v, (4, 4)).to_dense()),
    "csc": (MATRIX.to_sparse_csc(), lambda c, i, v: torch.sparse_csc_tensor(c, i, v, (4, 4)).to_dense()),
    "bsr": (MATRIX.to_sparse_bsr((2, 2)), lambda c, i, v: torch.sparse_bsr_tensor(c, i, v, (4, 4)).to_dense()),
    "bsc": (MATRIX.to_sparse_bsc((2, 2)), lambda c, i, v: torch.sparse_bsc_tensor(c, i, v, (4, 4)).to_dense()),
    "strided": (MATRIX, lambda m: m),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_tensor_of_any_layout_is_its_parts(name: str) -> None:
    tensor, whole = WHOLE[name]
    parts = parts_of(tensor)
    assert all(part.layout is torch.strided for part in parts) and torch.equal(whole(*parts), MATRIX)


def test_lazy_bits_and_nested_tensors_are_plain_memory() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    for lazy in (x.conj(), x.conj().imag, x.conj()[1:]):
        (part,) = parts_of(lazy)
        assert not part.is_conj() and not part.is_neg()
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and part.numel() * part.itemsize == 24
    (values,) = parts_of(torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]))
    assert values.tolist() == [1, 1, 0, 0, 0]
