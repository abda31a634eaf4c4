"""Where clients come in: at the API server of a cluster, or at the front of several models."""

from pydantic import Field

from cluster.configuration.node import ConfigNode


class AddressConfig(ConfigNode):
    """What is listened on, and whether everybody may come."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(default=8000, ge=1, le=65535, description="Port to listen on.")
    open_to_all: bool = Field(
        default=False,
        description="Serve on an address that other machines reach although no API key is set: something in front of "
        "it decides who may.",
    )
