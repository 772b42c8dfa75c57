//! Frames of private inference from somebody who need not be a client or a server.

use std::io::Cursor;

use fornax_private::frame::{Awaited, FRAME_BYTES_MAX, Reply, RequestOne, RequestZero, Shapes};

/// What both sides know: small matrices, and one of which a frame has few rows.
fn shapes() -> Shapes {
    Shapes(vec![(4, 3), (1, 8), (64, 64), (1 << 20, 2)])
}

/// Reads the input as frames: its first byte says who reads them, the rest is read to the first that is none. Whatever
/// is read is written again as the same bytes. Whether there was a frame.
pub fn frame(data: &[u8]) -> bool {
    let Some((&reader, bytes)) = data.split_first() else { return false };
    let shapes = shapes();
    let mut from = Cursor::new(bytes);
    let mut was_one = false;
    loop {
        let start = usize::try_from(from.position()).expect("it is within the input");
        let mut again = Vec::new();
        let read = match reader % 4 {
            0 => RequestZero::read(&mut from, &shapes).map(|frame| frame.write(&mut again)),
            1 => RequestOne::read(&mut from, &shapes).map(|frame| {
                if let RequestOne::Linear(draws) = &frame {
                    let work: u128 = draws.iter().map(|draw| draw.multiplications(&shapes)).sum();
                    // What a server compares with its bound must not wrap.
                    assert!(work <= draws.len() as u128 * u128::from(u64::MAX));
                }
                frame.write(&mut again);
            }),
            2 => Reply::read(&mut from, Awaited::Control, Vec::new()).map(|frame| {
                // JSON may be written in other ways.
                if !matches!(frame, Reply::Info(_)) {
                    frame.write(&mut again);
                }
            }),
            _ => Reply::read(&mut from, Awaited::Product { words: 5 }, Vec::new())
                .map(|frame| frame.write(&mut again)),
        };
        match read {
            Ok(()) => {
                let end = usize::try_from(from.position()).expect("it is within the input");
                assert!(end - start <= 5 + FRAME_BYTES_MAX);
                assert!(
                    again.is_empty() || again == bytes[start..end],
                    "{:?} became {again:?}",
                    &bytes[start..end]
                );
                was_one = true;
            }
            Err(error) => {
                let message = error.to_string();
                assert!(!message.is_empty() && message.len() < 4096, "{message:?}");
                return was_one;
            }
        }
    }
}
