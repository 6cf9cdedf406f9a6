"""Devices to compile for that are not there."""

import os

import jax
from jax.experimental import topologies


def tpu_devices(name: str) -> list[jax.Device]:
    """The devices of a slice of TPUs, such as "v5e:2x2" or "v5p:16x16x32".

    Raises:
      ValueError: libtpu is not installed, or knows no such slice.
    """
    # libtpu asks a cloud for these, waits, and complains of answers that it does not get.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(topology_name=name, platform="tpu").devices
    except Exception as error:  # of several types, none of them documented
        if "not installed" in str(error):
            raise ValueError(
                "this needs libtpu: `make libtpu` fetches it, PYTHONPATH=.libtpu shows it to JAX"
            ) from error
        raise ValueError(f"{name}: {str(error).splitlines()[0]}") from error
