"""schemathesis asks everything the OpenAPI document allows, and much that it does not.

Every check of schemathesis runs; what a check may not hold us to is named here with the reason.
"""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup

from tests.doors.http.live import Live

load_all_checks()

# Streams of events do not end: they have tests of their own.
ENDLESS = {"/topics/{topic}/stream"}
