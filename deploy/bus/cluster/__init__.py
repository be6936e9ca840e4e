"""What a cluster says about itself: brokers, settings, consumer groups, offsets by time. Changes nothing."""
