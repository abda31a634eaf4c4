"""Registers the connector by name in every vLLM process where this package is installed."""


def register() -> None:
    """Entry point `vllm.general_plugins`; vLLM may call it more than once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "TwinpoolConnector"
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "kvtransfer.vllm_connector", name)
