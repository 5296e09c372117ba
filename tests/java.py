"""How tests start a JVM."""

# Each lives for seconds: a second compiler, threads for its garbage and the verification of every class that it loads
# would cost more than they give.
QUICK_JAVA = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-XX:+UnlockDiagnosticVMOptions",
    "-XX:-BytecodeVerificationRemote",
)
