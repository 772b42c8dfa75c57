//! JSON that is changed at random and stays JSON.

use serde_json::Value;

use super::mutate::Random;

/// Changes something somewhere in it: a value becomes a strange one, a field goes or is called otherwise, a list grows.
pub fn alter(value: &mut Value, random: &mut Random, strange: &[Value]) {
    let is_here = random.below(4) == 0;
    match value {
        Value::Object(map) if !map.is_empty() && !is_here => {
            let key = map.keys().nth(random.below(map.len())).expect("it is one of them").clone();
            match random.below(12) {
                0 => drop(map.remove(&key)),
                1 => {
                    let moved = map.remove(&key).expect("it is there");
                    map.insert(format!("{key}a"), moved);
                }
                _ => alter(map.get_mut(&key).expect("it is there"), random, strange),
            }
        }
        Value::Array(list) if !list.is_empty() && !is_here => {
            let at = random.below(list.len());
            match random.below(8) {
                0 => drop(list.remove(at)),
                1 => list.extend_from_within(at..),
                _ => alter(&mut list[at], random, strange),
            }
        }
        _ => *value = random.of(strange).clone(),
    }
}
