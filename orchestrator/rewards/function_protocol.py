"""What client, host and worker agree on: paths, headers, limits and error types of the function host.

The host speaks the AWS Lambda Invoke REST API, so error types that Lambda has are spelled as Lambda spells them.
"""

from __future__ import annotations

INVOKE_SUFFIX = "/invocations"
INVOKE_PATH = "/2015-03-31/functions/{name}" + INVOKE_SUFFIX
PROVISION_PATH = "/2019-09-30/functions/{name}/provisioned-concurrency"
STATS_PATH = "/stats"
COLD_START_HEADER = (
    "X-Rl-Cold-Start"  # milliseconds that this call waited for a process to start; absent when it did not
)
ERROR_HEADER = "X-Amz-Function-Error"  # present: the function failed, the body is {"errorType", "errorMessage"}
TIMED_OUT = "Sandbox.Timedout"
NOT_FINITE = "Runtime.NotFinite"  # the result contains NaN or infinity, which JSON does not have
BAD_RESULT = "Runtime.MarshalError"
IMPORT_FAILED = "Runtime.ImportModuleError"
EXITED = "Runtime.ExitError"

MAX_BODY_BYTES = 1 << 20  # of a request and of a result; a trajectory of 100,000 tokens is about 600 kB
