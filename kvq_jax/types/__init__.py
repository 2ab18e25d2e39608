"""The types that everything else uses: arrays with named axes, pytrees that check their types,
checked integers, rotary positions."""
