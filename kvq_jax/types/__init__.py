"""What everything else is written in: arrays with named axes, pytrees that check their types,
integers as they came, rotary positions."""
