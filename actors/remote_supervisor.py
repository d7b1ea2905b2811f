"""The supervisor's class in the form Ray starts; remote_classes.py says why it is wrapped apart."""

from typing import Any

import ray
from ray.actor import ActorClass

from actors.supervisor import Supervisor

SupervisorCls: ActorClass[Any] = ray.remote(Supervisor)
