"""The two ends of a migration: the new node takes over, or is removed because the old node needs no replacement."""

from __future__ import annotations

from resile.core.context import Context
from resile.core.nodes import launching, scale_operations
from resile.core.state import Node


def complete(ctx: Context, node: Node) -> None:
    """If `node` was launched to replace another node in a migration, let it take over and remove the other node."""
    if node.replaces is None or not node.alive:
        return
    old = ctx.state.nodes[node.replaces]
    node.replaces = None
    if old.alive:
        launching.remove(ctx, old, f"was relieved by {node.key}")
    scale_operations.on_node_replaced(ctx, old.key, node.key)
    scale_operations.on_node_migrated(ctx, old.key)
    ctx.touch(node)
    ctx.note("NodeMigrated", f"{node.key} takes the place of {old.key}", node.key)


def cancel(ctx: Context, old: Node) -> None:
    """Remove the node that was to replace `old` in a migration. Call this only if `old` has taken its last step.

    Plans that wait for the removed node fail. Does nothing if no node was to replace `old`.
    """
    new = scale_operations.replacement_of(ctx, old.key)
    if new is not None:
        because = f"{old.key} took its last step before {new} was ready"
        scale_operations.fail_waiting_for(ctx, new, scale_operations.MIGRATION_FAILED, because)
        launching.remove(ctx, ctx.state.nodes[new], f"is not needed: {old.key} has taken its last step")
