"""Environment managers in processes of their own, shards: what plays and scores episodes there, the head's end, the messages."""
