"""Shard requests: what training processes ask of the ledger, and what they are answered."""

from __future__ import annotations

from resile.api.ids import NodeKey
from resile.core import shard_ledger
from resile.core.context import Context
from resile.core.shard_ledger import Lease, ShardRequest
from resile.protocol.shards import DatasetOpen, OpenDataset, ShardGranted, ShardNoted, ShardProgress, TakeShard


def on_open_dataset(ctx: Context, node: NodeKey, asked: OpenDataset) -> None:
    error = shard_ledger.open_dataset(
        ctx.state.ledger, asked.name, asked.size, asked.shard_size, asked.epochs, asked.seed
    )
    ctx.send(node, DatasetOpen(worker=asked.worker, request=asked.request, error=error))


def on_take_shard(ctx: Context, node: NodeKey, asked: TakeShard) -> None:
    request = ShardRequest(node, asked.worker, asked.request)
    error = shard_ledger.why_denied(ctx.state.ledger, asked.dataset, request)
    if error:
        ctx.send(node, ShardGranted(worker=asked.worker, request=asked.request, error=error))
        return
    granted = shard_ledger.request_shard(ctx.state.ledger.datasets[asked.dataset], request)
    if granted is not None:
        _grant(ctx, request, *granted)


def on_shard_progress(ctx: Context, node: NodeKey, asked: ShardProgress) -> None:
    """Count records of a lease as done, as a worker reports, and tell the worker whether its report counts.

    A report from a node that is lost is handled in the same way.
    """
    dataset = ctx.state.ledger.datasets.get(asked.dataset)
    counted = dataset is not None and shard_ledger.advance(dataset, node, asked.worker, asked.lease, asked.upto)
    ctx.send(node, ShardNoted(worker=asked.worker, request=asked.request, counted=counted))


def grant_waiting(ctx: Context) -> None:
    for request, number, lease in shard_ledger.grantable(ctx.state.ledger):
        _grant(ctx, request, number, lease)


def _grant(ctx: Context, request: ShardRequest, number: int, lease: Lease) -> None:
    ctx.send(
        request.node,
        ShardGranted(
            worker=request.worker,
            request=request.request,
            lease=number,
            epoch=lease.epoch,
            start=lease.start,
            end=lease.end,
        ),
    )
