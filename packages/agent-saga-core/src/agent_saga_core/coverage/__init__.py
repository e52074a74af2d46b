"""Coverage: which tools of an agent are wrapped, what became known of each, and where nobody can look.

A manifest says what was found in a real object (a graph, a crew, a list of tools) at one moment. An adapter's
`coverage` walks its framework's objects and makes the entries with `entry_for` and `opaque`; `docs/coverage.md` is the
manual.
"""

from agent_saga_core.coverage.entries import entry_for, opaque
from agent_saga_core.coverage.manifest import MANIFEST_VERSION, CoverageEntry, CoverageManifest
from agent_saga_core.coverage.scan import reach

__all__ = ["MANIFEST_VERSION", "CoverageEntry", "CoverageManifest", "entry_for", "opaque", "reach"]
