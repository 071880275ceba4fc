"""JetStream's error codes that we know, by name: the `err_code` of an answer, as in nats-server's errors.json.

`BackendError.code` carries one. What each means to us is decided by the sets below, in `backends.jetstream.faults`:
the HTTP-like code beside it says little. A full stream is a 503 that no retry cures, a refused update a 500 that is
final.
"""

from __future__ import annotations

PEERS_REBUILDING = 10004
NO_SUITABLE_PEERS = 10005
"""Also while servers are down, and until those of a cluster that has just started have heard of each other."""
NO_CLUSTER_MEMBER = 10007
TEMPORARILY_UNAVAILABLE = 10008
NO_LEADER = 10009
CONSUMER_NOT_CREATED = 10012
CONSUMER_NOT_FOUND = 10014
INSUFFICIENT_RESOURCES = 10023
INVALID_JSON = 10025
"""Also a field that the server does not know, if it is strict."""
RESOURCE_LIMITS_EXCEEDED = 10028
NO_MESSAGE = 10037
OFF_FOR_THE_ACCOUNT = 10039
SEQUENCE_NOT_FOUND = 10043
INSUFFICIENT_STORAGE = 10047
STREAM_NOT_CREATED = 10049
INVALID_STREAM_CONFIG = 10052
MESSAGE_TOO_LARGE = 10054
MESSAGE_NOT_DELETED = 10057
"""Also where there is no such message."""
STREAM_NAME_IN_USE = 10058
"""With another configuration."""
STREAM_NOT_FOUND = 10059
WRONG_STREAM = 10060
STREAM_NOT_RESTORED = 10062
SUBJECTS_OVERLAP = 10065
WRONG_LAST_SEQUENCE = 10071
"""The description says which one it is."""
NO_OTHER_PEER = 10075
"""Peer remap failed."""
STREAM_FULL = 10077
"""Of a stream with `discard: new`, or `discard_new_per_subject`, as its description says."""
HEADERS_TOO_LARGE = 10097
ROLLUP_NOT_PERMITTED = 10111
STREAM_OFFLINE = 10118
CONSUMER_OFFLINE = 10119
MAX_ACK_PENDING_EXCEEDED = 10121
FILTERS_OVERLAP = 10138
CONSUMER_EXISTS = 10148
"""With another configuration."""
PUBLISH_IN_PROCESS = 10158
"""Of a message of the same id."""
REPLICATION_LAG = 10163
OTHER_LAST_SEQUENCE = 10164
INVALID_TTL = 10165
TTL_OFF = 10166
TOO_MANY_REQUESTS = 10167
COUNTER_INCREMENT_MISSING = 10169
ATOMIC_BATCHES_OFF = 10174
SCHEDULES_OFF = 10188
INVALID_SCHEDULE = 10189
INVALID_SCHEDULE_TARGET = 10190
STREAM_OFFLINE_WITH_REASON = 10194
CONSUMER_OFFLINE_WITH_REASON = 10195
DUPLICATE_IN_BATCH = 10201
INVALID_RESET = 10204
FAST_BATCHES_OFF = 10205
TOO_MANY_BATCHES = 10210
TOO_MANY_BATCH_MESSAGES = 10211
SAYS_IT_WAS_SCHEDULED = 10212

NOT_FOUND = frozenset({CONSUMER_NOT_FOUND, NO_MESSAGE, SEQUENCE_NOT_FOUND, STREAM_NOT_FOUND})
CONFLICT = frozenset({WRONG_LAST_SEQUENCE, OTHER_LAST_SEQUENCE})
NO_ROOM = frozenset({INSUFFICIENT_RESOURCES, RESOURCE_LIMITS_EXCEEDED, INSUFFICIENT_STORAGE})
"""The servers or the account have too little storage for what a stream's configuration reserves."""
TRANSIENT = NO_ROOM | frozenset(
    {
        PEERS_REBUILDING,
        NO_SUITABLE_PEERS,
        NO_CLUSTER_MEMBER,
        TEMPORARILY_UNAVAILABLE,
        NO_LEADER,
        STREAM_OFFLINE,
        CONSUMER_OFFLINE,
        PUBLISH_IN_PROCESS,
        REPLICATION_LAG,
        TOO_MANY_REQUESTS,
        STREAM_OFFLINE_WITH_REASON,
        CONSUMER_OFFLINE_WITH_REASON,
        TOO_MANY_BATCHES,
        TOO_MANY_BATCH_MESSAGES,
    }
)
"""The same request may succeed later."""
ALLOWING_SETTINGS: dict[object, str] = {
    TTL_OFF: "allow_msg_ttl",
    ATOMIC_BATCHES_OFF: "allow_atomic",
    SCHEDULES_OFF: "allow_msg_schedules",
}
"""Which setting of a stream would allow what the server refuses."""
