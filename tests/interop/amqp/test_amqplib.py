"""amqplib for Node: installed from npm into a folder of the test, never into the repository."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.listeners.amqp.running import Running

pytestmark = pytest.mark.peer
FETCH_SECONDS_MAX = 240

SCRIPT = """
const amqp = require('amqplib');
const assert = require('assert');
(async () => {
  const connection = await amqp.connect(process.argv[2]);
  const channel = await connection.createConfirmChannel();
  await channel.assertExchange('js', 'headers', {durable: true});
  const dying = {deadLetterExchange: '', deadLetterRoutingKey: 'js-dead'};
  await channel.assertQueue('js', {durable: true, maxPriority: 5, ...dying});
  await channel.assertQueue('js-dead', {durable: true});
  await channel.bindQueue('js', 'js', '', {'x-match': 'any', kind: 'wanted'});
  for (let n = 0; n < 20; n++) {
    const headers = {kind: n % 2 ? 'wanted' : 'other'};
    channel.publish('js', '', Buffer.from(String(n)), {headers, priority: n % 3, persistent: true});
  }
  await channel.waitForConfirms();
  await channel.prefetch(3);
  const got = [];
  await new Promise((resolve) => {
    channel.consume('js', (message) => {
      got.push(Number(message.content));
      if (got.length <= 5) channel.ack(message); else channel.nack(message, false, false);
      if (got.length === 10) resolve();
    });
  });
  assert.deepStrictEqual([...got].sort((a, b) => a - b), [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]);
  let dead = 0;
  while (dead < 5) {
    dead = (await channel.checkQueue('js-dead')).messageCount;
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  assert.strictEqual(dead, 5);
  const one = await channel.get('js-dead');
  assert.strictEqual(one.properties.headers['x-death'][0].reason, 'rejected');
  await channel.close();
  await connection.close();
  console.log('all good');
})().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("amqplib NOT TESTED: node and npm are not installed")
    made = tmp_path_factory.mktemp("node")
    try:
        done = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--silent", "amqplib@2"],
            cwd=made, capture_output=True, check=False, timeout=FETCH_SECONDS_MAX,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.skip(f"amqplib NOT TESTED: npm did not give it in {FETCH_SECONDS_MAX} s")
    if done.returncode:
        pytest.skip(f"amqplib NOT TESTED: npm could not install it: {done.stderr.decode()[-300:]}")
    return made


def test_amqplib_publishes_consumes_and_dead_letters(running: Running, folder: Path) -> None:
    (folder / "script.js").write_text(SCRIPT)
    done = subprocess.run(
        ["node", "script.js", f"amqp://guest:guest@127.0.0.1:{running.port}"], cwd=folder, capture_output=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == b"all good", done.stderr.decode()
