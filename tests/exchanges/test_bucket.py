"""Buckets: views by parameter, in memory order, whatever the strides; chunks that share memory."""

import pytest
import torch

from gradwire.exchanges.bucket import cut, make_bucket, segments_of


@pytest.mark.parametrize(
    "grad",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(48.0).view(2, 3, 4, 2).contiguous(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.empty(0),
        torch.arange(6.0)[::2],
        torch.complex(torch.arange(4.0), -torch.arange(4.0)).view(2, 2),
    ],
    ids=["contiguous", "transposed", "channels_last", "0-dim", "empty", "strided", "complex"],
)
def test_grads_are_the_gradients(grad):
    bucket = make_bucket([torch.ones(5, dtype=grad.dtype), grad, torch.ones(1, dtype=grad.dtype)])
    assert torch.equal(bucket.grads[1], grad)
    assert not bucket.flat.is_complex()
    bucket.flat.mul_(2)
    assert torch.equal(bucket.grads[1], 2 * grad)
    assert bucket.names == ("0", "1", "2")
    assert bucket.params[1] is grad


def test_strided_gradients_lie_in_memory_order():
    """As in DDP's own buckets: a transposed parameter is laid out by its strides."""
    bucket = make_bucket([torch.arange(6.0).view(2, 3).t()])
    assert torch.equal(bucket.flat, torch.arange(6.0))


def test_chunks_share_memory_and_know_their_parameters():
    bucket = make_bucket([torch.zeros(3, 4), torch.zeros(5), torch.zeros(2)], ["a", "b", "c"])
    chunks = bucket.chunks(7)
    assert [chunk.flat.numel() for chunk in chunks] == [7, 7, 5]
    assert [chunk.names for chunk in chunks] == [("a",), ("a", "b"), ("b", "c")]
    assert [[segment.start for segment in chunk.segments] for chunk in chunks] == [[0], [7, 0], [2, 0]]
    chunks[1].flat.fill_(1)
    assert float(bucket.flat.sum()) == 7
    assert chunks[2].grads[1].shape == (2,)
    assert chunks[0].grads[0].shape == (7,)


def test_small_bucket_is_one_chunk():
    bucket = make_bucket([torch.zeros(7)])
    assert bucket.chunks(7) == [bucket]


def test_cut_leaves_out_empty_parts():
    segments = segments_of([torch.zeros(4), torch.zeros(0), torch.zeros(4)], ["a", "b", "c"])
    assert [part.name for part in cut(segments, 0, 4)] == ["a"]
    assert [part.name for part in cut(segments, 4, 8)] == ["c"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8])
def test_integers_are_refused(dtype):
    with pytest.raises(TypeError, match="floating or complex type, got"):
        make_bucket([torch.zeros(3, dtype=dtype)])


def test_mixed_types_are_refused():
    with pytest.raises(TypeError, match=r"of one type, got torch.float32 and torch.float64"):
        make_bucket([torch.zeros(3), torch.zeros(3, dtype=torch.float64)])


def test_empty_list_of_gradients_is_refused():
    with pytest.raises(ValueError, match="at least one tensor"):
        make_bucket([])
