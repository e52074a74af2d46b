"""What the entry point names: light, brings no framework."""

from agent_saga_core.fleet import Adapter

ADAPTER = Adapter(name="toyframe", package="toyframe_saga", roots=("toyframe",))
