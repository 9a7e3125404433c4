"""Live refit: a trainer's weights into running engines, all or nothing, checked, in bounded memory."""
