"""Hypothesis strategies for messages and batches."""

from hypothesis import strategies as st

from headrace.record.layout import AMQP_PROPERTIES_HEADER
from tests.record.oracle import Message

data = st.none() | st.binary(max_size=300)
# Hypothesis also draws string constants from the code. Under this name not every value would be valid.
names = st.text(max_size=20).filter(lambda name: name != AMQP_PROPERTIES_HEADER)
headers = st.lists(st.tuples(names, st.none() | st.binary(max_size=40)), max_size=4)
timestamps = st.integers(min_value=0, max_value=2**48)
messages = st.builds(Message, key=data, value=data, headers=headers, timestamp=timestamps)
batches = st.lists(messages, min_size=1, max_size=30)
codecs = st.integers(min_value=0, max_value=4)
