//! Ctrl-C: asks the work under way to stop; the second one ends the process at once.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// What was installed, if anything: locked for as long as it takes to copy it.
static INSTALLED: Mutex<Option<Interrupt>> = Mutex::new(None);

/// Whether the user has asked to stop.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt {
    asked: Arc<AtomicBool>,
    /// With this set the next signal ends the process: nothing is under way that could be left half-done.
    ends: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes over the signals, once for the process: every handler of a signal runs. Until [`during`](Self::during)
    /// they end the process as ever.
    pub(crate) fn install() -> anyhow::Result<Interrupt> {
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(interrupt) = &*installed {
            return Ok(interrupt.clone());
        }
        let interrupt =
            Interrupt { asked: Arc::new(AtomicBool::new(false)), ends: Arc::new(AtomicBool::new(true)) };
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_default(signal, Arc::clone(&interrupt.ends))?;
            flag::register(signal, Arc::clone(&interrupt.asked))?;
            // Runs after the first signal was noted, so that a second one is obeyed even if nobody looks.
            flag::register(signal, Arc::clone(&interrupt.ends))?;
        }
        *installed = Some(interrupt.clone());
        Ok(interrupt)
    }

    /// Leaves the next signal to whoever handles signals from here on: a server that has fetched a model lets answers
    /// end. The one after it ends the process.
    pub(crate) fn leave() {
        if let Some(interrupt) = &*INSTALLED.lock().unwrap_or_else(PoisonError::into_inner) {
            interrupt.ends.store(false, Ordering::Relaxed);
        }
    }

    /// Runs `work`, which looks at [`asked`](Self::asked) now and then.
    pub(crate) fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.asked.store(false, Ordering::Relaxed);
        self.ends.store(false, Ordering::Relaxed);
        let result = work();
        self.ends.store(true, Ordering::Relaxed);
        result
    }

    /// Whether a signal came since the work began.
    pub(crate) fn asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Whether to go on, for loops that are told so.
    pub(crate) fn flow(&self) -> ControlFlow<()> {
        if self.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}
