"""A KV connector that takes part in every step and does nothing: what an engine is measured with.

It knows nothing of recurrent boundary blocks and so does not opt in; it runs on the published
vLLM and on the patched one alike. Runs inside an engine environment.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class PassiveMetadata(KVConnectorMetadata):
    """Nothing for the worker."""


class PassiveConnector(KVConnectorBase_V1, SupportsHMA):
    """Matches nothing, stores nothing, delays nothing."""

    @property
    def requires_kv_delivery(self):
        """A preempted request loses nothing that this connector owed to anyone."""
        return False

    def start_load_kv(self, forward_context, **kwargs):
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name):
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        """Nothing to save."""

    def wait_for_save(self):
        """Nothing to wait for."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        """No token is found outside the engine."""
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        """No block is of interest."""

    def build_connector_meta(self, scheduler_output):
        """The worker must get something in every step."""
        return PassiveMetadata()

    def request_finished(self, request, block_ids):
        """Blocks may be freed at once."""
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        """Blocks may be freed at once."""
        return False, None
